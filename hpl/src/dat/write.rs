//! The other way: an `HPL.dat` of netlib's 31 lines that any HPL reads.

use std::fmt::Display;

use super::field::{Field, NETLIB};
use crate::params::{Input, Pmap, Sink, Swap};

/// What a line may look like, for someone who lacks it.
pub fn sample(field: Field) -> String {
    let at = NETLIB.iter().position(|f| *f == field);
    let line = at.and_then(|at| write(&Input::default()).lines().nth(at).map(str::to_owned));
    line.unwrap_or_else(|| field.name().to_owned())
}

/// The file's text. What netlib cannot say (the seed) is left out.
pub fn write(input: &Input) -> String {
    let mut lines = vec![
        "HPLinpack benchmark input file".to_string(),
        format!("written by hpl-run of fulmen {}", env!("CARGO_PKG_VERSION")),
    ];
    let mut one = |value: &dyn Display, label: &str| lines.push(format!("{value:<12} {label}"));
    let (name, device) = match &input.sink {
        Sink::Stdout => ("HPL.out".to_string(), 6),
        Sink::Stderr => ("HPL.out".to_string(), 7),
        Sink::File(path) => (path.display().to_string(), 8),
    };
    let words = |values: &[usize]| values.iter().map(usize::to_string).collect::<Vec<_>>().join(" ");
    let digits = |values: &mut dyn Iterator<Item = usize>| words(&values.collect::<Vec<_>>());
    let bit = |set: bool| u8::from(set);
    let swap = Swap::ALL.iter().position(|s| *s == input.swap).unwrap_or(2);

    one(&name, "output file name (if any)");
    one(&device, "device out (6=stdout,7=stderr,file)");
    one(&input.ns.len(), "# of problems sizes (N)");
    one(&words(&input.ns), "Ns");
    one(&input.nbs.len(), "# of NBs");
    one(&words(&input.nbs), "NBs");
    one(&bit(input.pmap == Pmap::Column), "PMAP process mapping (0=Row-,1=Column-major)");
    one(&input.grids.len(), "# of process grids (P x Q)");
    one(&digits(&mut input.grids.iter().map(|g| g.0)), "Ps");
    one(&digits(&mut input.grids.iter().map(|g| g.1)), "Qs");
    one(&format!("{:?}", input.threshold), "threshold");
    one(&input.pfacts.len(), "# of panel fact");
    one(&digits(&mut input.pfacts.iter().map(|f| *f as usize)), "PFACTs (0=left, 1=Crout, 2=Right)");
    one(&input.nbmins.len(), "# of recursive stopping criterium");
    one(&words(&input.nbmins), "NBMINs (>= 1)");
    one(&input.ndivs.len(), "# of panels in recursion");
    one(&words(&input.ndivs), "NDIVs");
    one(&input.rfacts.len(), "# of recursive panel fact.");
    one(&digits(&mut input.rfacts.iter().map(|f| *f as usize)), "RFACTs (0=left, 1=Crout, 2=Right)");
    one(&input.bcasts.len(), "# of broadcast");
    one(&digits(&mut input.bcasts.iter().map(|b| b.digit())), "BCASTs (0=1rg,1=1rM,2=2rg,3=2rM,4=Lng,5=LnM)");
    one(&input.depths.len(), "# of lookahead depth");
    one(&words(&input.depths), "DEPTHs (>=0)");
    one(&swap, "SWAP (0=bin-exch,1=long,2=mix)");
    one(&input.swap_threshold, "swapping threshold");
    one(&bit(!input.l1_transposed), "L1 in (0=transposed,1=no-transposed) form");
    one(&bit(!input.u_transposed), "U  in (0=transposed,1=no-transposed) form");
    one(&bit(input.equil), "Equilibration (0=no,1=yes)");
    one(&input.align, "memory alignment in double (> 0)");
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{Bcast, Fact};
    use proptest::prelude::*;

    fn list<T: Clone + std::fmt::Debug>(of: impl Strategy<Value = T>) -> impl Strategy<Value = Vec<T>> {
        prop::collection::vec(of, 1..12)
    }

    proptest! {
        /// What is written is read again, without a word.
        #[test]
        fn reads_back(
            ns in list(0usize..1_000_000),
            nbs in list(1usize..5000),
            grids in list((1usize..100, 1usize..100)),
            facts in list(prop::sample::select(&Fact::ALL[..])),
            nbmins in list(1usize..64),
            ndivs in list(2usize..9),
            bcasts in list(prop::sample::select(&Bcast::ALL[..])),
            depths in list(0usize..3),
            swap in prop::sample::select(&Swap::ALL[..]),
            threshold in 1e-30f64..1e3,
            (column, l1_transposed, u_transposed, equil) in any::<(bool, bool, bool, bool)>(),
            sink in prop::sample::select(vec![Sink::Stdout, Sink::Stderr, Sink::File("my.out".into())]),
        ) {
            let pmap = if column { Pmap::Column } else { Pmap::Row };
            let input = Input {
                sink, ns, nbs, pmap, grids, threshold, pfacts: facts.clone(), nbmins, ndivs, rfacts: facts,
                bcasts, depths, swap, l1_transposed, u_transposed, equil, ..Input::default()
            };
            let parsed = super::super::read("x", write(&input).as_bytes()).expect("it is sound");
            prop_assert_eq!(parsed.warnings, vec![]);
            prop_assert_eq!(parsed.input, input);
        }
    }
}
