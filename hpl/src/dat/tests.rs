//! The files of the field (shared case numbers K1-xx), rebuilt small, and what must come of them.

use super::*;
use crate::params::{Bcast, Fact, Pmap, Sink, Swap};
use proptest::prelude::*;

/// A netlib file of one run, as lines 1..=31.
const LINES: [&str; 31] = [
    "HPLinpack benchmark input file",
    "Innovative Computing Laboratory, University of Tennessee",
    "HPL.out      output file name (if any)",
    "6            device out (6=stdout,7=stderr,file)",
    "1            # of problems sizes (N)",
    "500          Ns",
    "1            # of NBs",
    "64           NBs",
    "0            PMAP process mapping (0=Row-,1=Column-major)",
    "1            # of process grids (P x Q)",
    "2            Ps",
    "2            Qs",
    "16.0         threshold",
    "1            # of panel fact",
    "2            PFACTs (0=left, 1=Crout, 2=Right)",
    "1            # of recursive stopping criterium",
    "4            NBMINs (>= 1)",
    "1            # of panels in recursion",
    "2            NDIVs",
    "1            # of recursive panel fact.",
    "1            RFACTs (0=left, 1=Crout, 2=Right)",
    "1            # of broadcast",
    "1            BCASTs (0=1rg,1=1rM,2=2rg,3=2rM,4=Lng,5=LnM)",
    "1            # of lookahead depth",
    "1            DEPTHs (>=0)",
    "2            SWAP (0=bin-exch,1=long,2=mix)",
    "64           swapping threshold",
    "0            L1 in (0=transposed,1=no-transposed) form",
    "0            U  in (0=transposed,1=no-transposed) form",
    "1            Equilibration (0=no,1=yes)",
    "8            memory alignment in double (> 0)",
];

/// The file with some lines (from 1) replaced.
fn with(changes: &[(usize, &str)]) -> String {
    let mut lines: Vec<&str> = LINES.to_vec();
    for (number, text) in changes {
        lines[number - 1] = text;
    }
    lines.join("\n") + "\n"
}

fn good(text: &str) -> Parsed {
    read("HPL.dat", text.as_bytes()).unwrap_or_else(|e| panic!("{}", show(&e)))
}

fn bad(text: &str) -> String {
    show(&read("HPL.dat", text.as_bytes()).expect_err("must be refused"))
}

fn show(all: &[Diagnostic]) -> String {
    all.iter().map(|d| d.to_string()).collect::<Vec<_>>().join("\n")
}

/// Whichever of its lines a file has lost, that is what is told: not what the lines below it then mean.
#[test]
fn a_lost_line_is_told_as_one() {
    // PMAP's is no loss: HPL 1.0 had none. The last two leave a file that is too short by what is named.
    for lost in (3..=29).filter(|lost| *lost != 9) {
        let mut lines = LINES.to_vec();
        lines.remove(lost - 1);
        let said = bad(&(lines.join("\n") + "\n"));
        assert!(
            said.contains("a line is missing above") && said.matches("HPL.dat:").count() == 1,
            "{lost}: {said}"
        );
        let at = said.split(':').nth(1).unwrap().parse::<usize>().unwrap();
        assert!((lost..lost + 2).contains(&at), "{lost}: {said}");
    }
    for doubled in 3..=29 {
        let mut lines = LINES.to_vec();
        lines.insert(doubled, LINES[doubled - 1]);
        let said = bad(&(lines.join("\n") + "\n"));
        assert!(said.contains("a line too many above"), "{doubled}: {said}");
    }
}

/// The one warning about a line.
fn warning(parsed: &Parsed, line: usize) -> String {
    let mut found = parsed.warnings.iter().filter(|w| w.line == line);
    let first = found.next().unwrap_or_else(|| panic!("no warning on line {line}"));
    assert!(found.next().is_none());
    first.to_string()
}

#[test]
fn a_plain_file_is_read_without_a_word() {
    let parsed = good(&with(&[]));
    assert_eq!((parsed.warnings, parsed.notes), (vec![], vec![]));
    let expected = Input {
        ns: vec![500],
        nbs: vec![64],
        grids: vec![(2, 2)],
        nbmins: vec![4],
        pfacts: vec![Fact::Right],
        rfacts: vec![Fact::Crout],
        ..Input::default()
    };
    assert_eq!(parsed.input, expected);
}

#[test]
fn k1_01_default_sweep_is_864_runs() {
    let parsed = good(&with(&[
        (5, "4            # of problems sizes (N)"),
        (6, "29 30 34 35  Ns"),
        (7, "4            # of NBs"),
        (8, "1 2 3 4      NBs"),
        (10, "3            # of process grids (P x Q)"),
        (11, "2 1 4        Ps"),
        (12, "2 4 1        Qs"),
        (14, "3            # of panel fact"),
        (15, "0 1 2        PFACTs (0=left, 1=Crout, 2=Right)"),
        (16, "2            # of recursive stopping criterium"),
        (17, "2 4          NBMINs (>= 1)"),
        (20, "3            # of recursive panel fact."),
        (21, "0 1 2        RFACTs (0=left, 1=Crout, 2=Right)"),
    ]));
    assert_eq!(parsed.warnings, []);
    assert_eq!(parsed.input.count(), 864);
    assert_eq!(parsed.input.grids, [(2, 2), (1, 4), (4, 1)]);
    assert_eq!(parsed.input.ranks_needed(), 4);
}

#[test]
fn k1_02_crlf_and_a_file_name_without_cr() {
    let text = with(&[(3, "HPL.out"), (4, "8")]).replace('\n', "\r\n");
    let parsed = good(&text);
    assert_eq!(parsed.input.sink, Sink::File("HPL.out".into()));
    assert_eq!(parsed.input.ns, [500]);
    assert_eq!(parsed.warnings, []);
}

#[test]
fn k1_04_count_beyond_the_values() {
    let text = with(&[
        (5, "32           # of problems sizes (N)"),
        (6, "1000    50000  \t     Ns"),
        (10, "3            # of process grids (P x Q)"),
        (11, "1   2   4    Ps"),
        (12, "16  8   3    Qs"),
    ]);
    assert_eq!(
        bad(text.trim_end()),
        "HPL.dat:6: N: line 5 asks for 32 values (xhpl takes at most 20), but there are 2\n\
         \x20   6 | 1000    50000        Ns\n\
         \x20     |                      ^^ write 2 on line 5, or add 30 here"
    );
}

#[test]
fn k1_05_several_blanks_are_one() {
    let parsed = good(&with(&[(5, "3"), (6, "29   30   34  Ns")]));
    assert_eq!(parsed.input.ns, [29, 30, 34]);
    assert!(
        warning(&parsed, 6).contains("29, 30, 34 is run; xhpl, which counts blanks, would run 29, 30, 0")
    );
}

#[test]
fn k1_07_glued_label() {
    let parsed = good(&with(&[(5, "2"), (6, "850 900Ns")]));
    assert_eq!(parsed.input.ns, [850, 900]);
    assert_eq!(
        warning(&parsed, 6),
        "HPL.dat:6: N: the label is glued to the value; 900 is taken\n\
         \x20   6 | 850 900Ns\n\
         \x20     |     ^^^^^ put a blank between them"
    );
    let parsed = good(&with(&[(5, "1# of problem sizes"), (13, "16.0threshold")]));
    assert_eq!((parsed.warnings.len(), parsed.input.threshold), (2, 16.0));
    let all = good(&with(&[
        (5, "10"),
        (6, "850 900 950 1000 1050 1100 1150 1200 1250 1300Ns"),
        (7, "6"),
        (8, "32 64 96 128 192 256"),
        (10, "2"),
        (11, "1 2"),
        (12, "4 2"),
        (14, "3"),
        (15, "0 1 2"),
        (16, "3"),
        (17, "2 4 8"),
        (20, "3"),
        (21, "0 1 2"),
    ]));
    assert_eq!(all.input.count(), 3240);
}

#[test]
fn k1_08_blank_alignment() {
    // As the file has it: a line 31 with blanks and then an end, or none at all.
    for end in ["      \n# tail\n", "\n\n"] {
        let text = with(&[]).replace("8            memory alignment in double (> 0)\n", end);
        let parsed = good(&text);
        assert_eq!(parsed.input.align, 8);
        assert_eq!(parsed.warnings.len(), 1, "{}", show(&parsed.warnings));
        assert!(parsed.warnings[0].message.contains("8 is taken"));
    }
}

#[test]
fn k1_10_mixed_precision_file() {
    let mxp = "HPLinpack benchmark input file\nInnovative\nHPL-MxP.out  output file name (if any)\n\
        0            device out (6=stdout,7=stderr,file)\n1            # of problems sizes (N)\n\
        200          Ns\n1            # of NBs\n32           NBs\n\
        1            PMAP process mapping (0=Row-,1=Column-major)\n1            P\n1            Q\n\
        16.0         threshold\n1            # of broadcast\n0            BCASTs (0=1rg)\n";
    let message = bad(mxp);
    assert!(message.starts_with("HPL.dat:10: layout: this is the 14-line input of HPL-MxP"), "{message}");
    assert!(message.contains("`hpl-run -N 200 --nb 32 -P 1 -Q 1`"), "{message}");
}

/// Other versions of that benchmark have other lines; what it is they are told all the same.
#[test]
fn other_mixed_precision_files() {
    let named = "HPL-MxP benchmark input file\nx\nout\n6\n1\n300 Ns\n1\n64 NBs\n1 PMAP\n1 grids\n2 Ps\n3 Qs\n16 threshold\n1\n0\n";
    let unnamed = "t\nt\nout\n6 device out\n1 # of problems sizes (N)\n300 Ns\n1 # of NBs\n64 NBs\n1 PMAP\n\
        1 # of process grids (P x Q)\n2 Ps\n3 Qs\n16.0 threshold\n1 # of broadcast\n0 BCASTs\n1 # of lookahead depth\n0 DEPTHs\n";
    for text in [named, unnamed] {
        let message = bad(text);
        assert!(message.contains("-line input of HPL-MxP"), "{message}");
        assert!(message.contains("`hpl-run -N 300 --nb 64 -P 2 -Q 3`"), "{message}");
    }
}

/// A number with a blank, or a NUL byte, in it is another experiment to xhpl, and none here; a list that its count cuts is run as
/// files in the field mean it.
#[test]
fn torn_numbers_are_refused() {
    for (line, shown, remedy) in [
        ("1 000        Ns", "`1 000` is 1 to xhpl", "write 1000"),
        ("20 000       Ns", "`20 000` is 20 to xhpl", "write 20000"),
        ("1 048 576 Ns", "`1 048 576` is 1 to xhpl", "write 1048576"),
        ("5\x0000          Ns", "a NUL byte stands between `5` and `00`", "write 500"),
        ("1\0\x00024", "a NUL byte stands between `1` and `024`", "write 1024"),
    ] {
        let message = bad(&with(&[(6, line)]));
        assert!(message.starts_with("HPL.dat:6: N: ") && message.contains(shown), "{message}");
        assert!(message.contains("^ ") && message.contains(remedy), "{message}");
        for (count, list) in [(7, 8), (16, 17)] {
            assert!(bad(&with(&[(list, line)])).starts_with(&format!("HPL.dat:{list}: ")), "{count}");
        }
    }
    for line in ["100 200 300 Ns", "29 30 34 Ns", "1000 0 Ns", "10 20\0 Ns"] {
        assert!(!good(&with(&[(6, line)])).warnings.is_empty());
    }
    assert!(bad(&with(&[(5, "1\x00002 Ns")])).contains("a NUL byte stands between"));
    assert_eq!(good(&with(&[(5, "2"), (6, "100 200 Ns")])).input.ns, [100, 200]);
}

#[test]
fn nothing_but_nul_bytes() {
    let message = bad(&"\0".repeat(1000));
    assert!(message.contains("holds nothing but NUL bytes"), "{message}");
    assert!(bad("").contains("the file is empty"));
}

#[test]
fn names_of_the_output() {
    let device = |name: &str| with(&[(3, name), (4, "8 device out")]);
    let parsed = good(&device("\"x.out\"  output file"));
    assert_eq!(parsed.input.sink, Sink::File("x.out".into()));
    assert!(warning(&parsed, 3).contains("to xhpl the quotes are part of the name"));
    assert!(bad(&device("- output file")).contains("write 6 as device out for stdout"));
    assert!(bad(&device("'my file'")).contains("a name ends at its first blank"));
}

#[test]
fn deep_look_ahead_is_shown() {
    let parsed = good(&with(&[(24, "3 # of lookahead depth"), (25, "0 64 3 DEPTHs")]));
    assert_eq!(parsed.input.depths, [0, 2, 2]);
    let message = warning(&parsed, 25);
    assert!(message.starts_with("HPL.dat:25: DEPTH: 64: 2 panels are kept ahead at most"), "{message}");
    assert!(message.contains("|   ^^ deeper"), "{message}");
}

#[test]
fn k1_11_device_zero_is_a_file() {
    let parsed = good(&with(&[(4, "0            device out (6=stdout,7=stderr,file)")]));
    assert_eq!(parsed.input.sink, Sink::File("HPL.out".into()));
    assert_eq!(parsed.device.unwrap(), "HPL.dat: device 0: the report goes to HPL.out");
    assert_eq!(good(&with(&[(4, "file")])).input.sink, Sink::File("HPL.out".into()));
    assert_eq!(good(&with(&[(4, "7")])).input.sink, Sink::Stderr);
}

#[test]
fn k1_13_hpcc_tail_is_mentioned_once() {
    let tail = "##### This line (no. 32) is ignored (it serves as a separator). ######\n\
        0                               Number of additional problem sizes for PTRANS\n\
        1200 10000 30000                values of N\n\
        0                               number of additional blocking sizes for PTRANS\n\
        40 9 8 13 13 20 16 32 64        values of NB\n";
    let parsed = good(&(with(&[]) + tail));
    assert_eq!(
        parsed.notes,
        ["HPL.dat: line 32 and below are not HPL's (HPCC has its PTRANS part there): ignored"]
    );
    assert_eq!(parsed.input, good(&with(&[])).input);
}

#[test]
fn k1_14_placeholders_are_named_all_at_once() {
    let message = bad(&with(&[
        (6, "problemSize      Ns"),
        (7, "blockCount           # of NBs"),
        (8, "blockSize         # NBs"),
        (17, "48           NBMINs (>= 1)"),
        (19, "8           NDIVs"),
        (23, "7           BCASTs (0=1rg,1=1rM,2=2rg,3=2rM,4=Lng,5=LnM)"),
    ]));
    for (line, word) in [(6, "problemSize"), (7, "blockCount"), (8, "blockSize")] {
        assert!(message.contains(&format!("HPL.dat:{line}: ")), "{message}");
        assert!(message.contains(&format!("`{word}` is not a number")), "{message}");
    }
    for word in ["__N__", "{{ n }}", "${size}"] {
        assert!(bad(&with(&[(6, word)])).contains("is not a number"));
    }
}

#[test]
fn k1_16_block_beyond_the_order() {
    let parsed = good(&with(&[(6, "20"), (8, "8192")]));
    assert_eq!((parsed.input.ns, parsed.input.nbs), (vec![20], vec![8192]));
}

#[test]
fn k1_19_bare_n_and_zero_nb() {
    assert_eq!(good(&with(&[(6, "4096")])).input.ns, [4096]);
    assert_eq!(
        bad(&with(&[(6, "4096"), (8, "0 NBs")])),
        "HPL.dat:8: NB: 0: NB must be at least 1\n    8 | 0 NBs\n      | ^ write 1 or more"
    );
}

#[test]
fn k1_20_a_long_sweep_is_counted() {
    let parsed = good(&with(&[
        (5, "6"),
        (6, "5000 7500 10000 15000 20000 25000 Ns"),
        (7, "6"),
        (8, "32 64 96 128 192 256   NBs"),
        (10, "6"),
        (11, "1 2 4 6 12 24  Ps"),
        (12, "24 12 6 4 2 1  Qs"),
        (14, "3"),
        (15, "0 1 2"),
        (16, "2"),
        (17, "2 4"),
        (20, "3"),
        (21, "0 1 2"),
    ]));
    assert_eq!((parsed.input.count(), parsed.input.ranks_needed()), (3888, 24));
}

#[test]
fn k2_02_no_threshold_means_unchecked() {
    for text in ["0.0", "-16.0"] {
        let parsed = good(&with(&[(13, text)]));
        assert!(warning(&parsed, 13).contains("unchecked, never as passed"));
        assert!(!parsed.input.run(0).checked());
    }
}

#[test]
fn numbers_that_atoi_would_cut() {
    for (word, remedy) in [
        ("1e2", "write 100"),
        ("1,000", "write 1000 for one value, 1 000 for a list"),
        ("1000,2000", "write 1000 2000"),
        ("1_000", "write 1000"),
        ("29.0", "write 29"),
        ("29.5", "write a whole number, in digits"),
        ("100k", "write a whole number, in digits"),
        ("0x10", "write a whole number, in digits"),
        ("99999999999999999999", "write at most 2147483647"),
        ("4294967296", "write at most 2147483647"),
        ("-1", "write 0 or more"),
    ] {
        let message = bad(&with(&[(6, &format!("{word}   Ns"))]));
        assert!(message.ends_with(&format!("{} {remedy}", "^".repeat(word.len()))), "{message}");
    }
    assert_eq!(
        bad(&with(&[(6, "1e2   Ns")])),
        "HPL.dat:6: N: `1e2` is not a whole number\n    6 | 1e2   Ns\n      | ^^^ write 100"
    );
}

#[test]
fn each_repair_of_netlib_is_a_warning() {
    let parsed = good(&with(&[
        (9, "2            PMAP process mapping (0=Row-,1=Column-major)"),
        (15, "3            PFACTs"),
        (21, "-1           RFACTs"),
        (23, "7            BCASTs"),
        (26, "9            SWAP"),
        (27, "-5           swapping threshold"),
        (28, "2            L1"),
        (29, "3            U"),
        (30, "7            Equilibration"),
        (31, "0            memory alignment"),
    ]));
    let input = parsed.input.clone();
    assert_eq!((input.pmap, input.pfacts[0], input.rfacts[0]), (Pmap::Row, Fact::Right, Fact::Right));
    assert_eq!((input.bcasts[0], input.swap, input.swap_threshold), (Bcast::Ring1M, Swap::SpreadRoll, 0));
    assert_eq!((input.l1_transposed, input.u_transposed, input.equil, input.align), (true, true, true, 4));
    for line in [9, 15, 21, 23, 26, 27, 28, 29, 30, 31] {
        assert!(warning(&parsed, line).contains("taken, as xhpl does"), "line {line}");
    }
    assert_eq!(
        warning(&parsed, 23),
        "HPL.dat:23: BCAST: 7 is not one of them; 1ringM is taken, as xhpl does\n\
         \x20  23 | 7            BCASTs\n\
         \x20     | ^ write 0 1ring, 1 1ringM, 2 2ring, 3 2ringM, 4 Blong, 5 BlongM"
    );
}

#[test]
fn unused_and_very_many_values() {
    let parsed = good(&with(&[(6, "500 600 700 Ns")]));
    assert_eq!(parsed.input.ns, [500]);
    assert!(warning(&parsed, 6).contains("line 5 asks for 1 only: 600 700 is not run"));
    let many: Vec<String> = (1..=25).map(|n| n.to_string()).collect();
    let parsed = good(&with(&[(5, "25"), (6, &many.join(" "))]));
    assert_eq!(parsed.input.ns.len(), 25);
    assert!(warning(&parsed, 5).contains("xhpl takes at most 20"));
    assert!(bad(&with(&[(5, "0")])).contains("at least one value is needed"));
}

#[test]
fn a_lost_line_is_found_by_the_labels() {
    // A pair of lines lost: netlib runs another experiment and says PASSED.
    let mut lines = LINES.to_vec();
    lines.drain(15..17);
    let message = bad(&lines.join("\n"));
    assert!(
        message.starts_with(
            "HPL.dat:16: # of NBMINs: line 16 must be # of NBMINs, but its label says # of NDIVs"
        ),
        "{message}"
    );
    assert!(
        message.ends_with(
            "a line is missing above; # of NBMINs belongs here, as in `1            # of recursive stopping criterium`"
        ),
        "{message}"
    );
    // A line too many.
    let mut lines = LINES.to_vec();
    lines.insert(8, "0            something");
    assert!(bad(&lines.join("\n")).contains("there is a line too many above"));
    // The end lost.
    let message = bad(&LINES[..20].join("\n"));
    assert!(
        message.starts_with("HPL.dat:20: layout: the file ends here: line 21, RFACT, is missing"),
        "{message}"
    );
    let remedy =
        "add the lines up to 30, of which the first may be `2            RFACTs (0=left, 1=Crout, 2=Right)`";
    assert!(message.ends_with(remedy), "{message}");
    assert!(bad("").contains("the file is empty"));
    // One odd label is only a label.
    let parsed = good(&with(&[(12, "2   Ps")]));
    assert_eq!(parsed.input.grids, [(2, 2)]);
    assert!(warning(&parsed, 12).contains("the line is read as Q"));
    // No labels at all: the places count.
    let bare: Vec<&str> = LINES.iter().map(|l| l.split_whitespace().next().unwrap()).collect();
    assert_eq!(good(&bare.join("\n")).input, good(&with(&[])).input);
}

#[test]
fn other_layouts() {
    let mut gpu: Vec<&str> = LINES[..25].to_vec();
    gpu[22] = "6            BCASTs (0=1rg,1=1rM,2=2rg,3=2rM,4=Lng,5=LnM,6=MPI)";
    gpu[23] = "1            # of lookahead options";
    gpu[24] = "1            LOOKAHEADs (enable = 1)";
    gpu.extend([
        "8            memory alignment in double (> 0)",
        "7            Seed for the matrix generation",
    ]);
    let parsed = good(&gpu.join("\n"));
    assert_eq!((parsed.input.seed, parsed.input.swap, parsed.input.align), (7, Swap::Mix, 8));
    assert!(parsed.notes[0].contains("HPL-GPU"));
    assert!(warning(&parsed, 23).contains("1ringM is taken"));

    let mut first: Vec<&str> = LINES.to_vec();
    first.remove(8);
    let parsed = good(&first.join("\n"));
    assert_eq!(parsed.input, Input { pmap: Pmap::Column, ..good(&with(&[])).input });
    assert!(parsed.notes[0].contains("no PMAP line"));
}

#[test]
fn tabs_bom_and_no_final_newline() {
    let text = with(&[(5, "3\t# of problems sizes (N)"), (6, "500\t600\t700\tNs")]).replace("   ", "\t");
    let parsed = good(&format!("\u{feff}{}", text.trim_end()));
    assert_eq!(parsed.input.ns, [500, 600, 700]);
}

#[test]
fn blank_and_huge_values() {
    assert_eq!(
        bad(&with(&[(8, "   ")])),
        "HPL.dat:8: NB: the line is blank\n    8 | \n      | ^ write the value of NB"
    );
    for (line, text) in [(13, "nan"), (13, "abc"), (19, "1"), (17, "0"), (25, "-1"), (11, "0"), (9, "row")] {
        assert!(bad(&with(&[(line, text)])).starts_with(&format!("HPL.dat:{line}: ")), "{text}");
    }
}

proptest! {
    /// Whatever the bytes, the reader answers: a value or messages that point into the file.
    #[test]
    fn no_bytes_upset_it(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        if let Err(all) = read("x", &bytes) {
            prop_assert!(!all.is_empty());
            all.iter().for_each(|d| { d.to_string(); });
        }
    }

    /// Likewise for files that are nearly right.
    #[test]
    fn no_slip_upsets_it(
        slips in prop::collection::vec((0usize..31, "[-0-9a-zA-Z#., \t(){}_é]{0,20}"), 0..4),
        lost in prop::option::of(0usize..31),
    ) {
        let mut lines: Vec<String> = LINES.iter().map(|l| l.to_string()).collect();
        for (at, text) in slips {
            lines[at] = text;
        }
        if let Some(lost) = lost {
            lines.remove(lost);
        }
        match read("x", lines.join("\n").as_bytes()) {
            Ok(parsed) => {
                prop_assert!(parsed.input.count() > 0);
                prop_assert!(parsed.input.nbs.iter().all(|&nb| nb >= 1));
                parsed.warnings.iter().for_each(|d| { d.to_string(); });
            }
            Err(all) => {
                prop_assert!(!all.is_empty());
                all.iter().for_each(|d| { d.to_string(); });
            }
        }
    }
}
