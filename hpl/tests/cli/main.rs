//! The program itself: what it prints where, and how it ends.

#[cfg(target_os = "linux")]
mod cgroup;
#[cfg(target_os = "linux")]
mod memory;

use std::path::Path;
use std::process::{Command, Output};

fn call(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } =
        Command::new(env!("CARGO_BIN_EXE_hpl-run")).args(args).current_dir(folder).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (status.code().expect("it ends by itself"), text(stdout), text(stderr))
}

#[test]
fn help_and_version() {
    let folder = tempfile::tempdir().unwrap();
    for (flag, words) in [("-h", "Exit status:"), ("--help", "no MPI and no launcher"), ("-V", "hpl-run 0.")]
    {
        let (code, out, err) = call(folder.path(), &[flag]);
        assert_eq!((code, err.as_str()), (0, ""));
        assert!(out.contains(words), "{out}");
    }
}

#[test]
fn check_prints_the_plan_and_starts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (code, out, err) =
        call(folder.path(), &["--check", "-N", "100,200", "--nb", "32", "-P", "1", "-Q", "2"]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with("2 runs\nlargest   N 200   NB 32   grid 1x2"), "{out}");
    // K5-04: plans for a machine that this one is not.
    let (code, out, err) =
        call(folder.path(), &["--check", "-N", "5786112", "--nb", "384", "-P", "64", "-Q", "64"]);
    assert_eq!(code, 3);
    assert!(out.contains("243.6 TiB for the matrix, 60.9 GiB a rank"), "{out}");
    assert!(err.contains("nothing was run; so many ranks and threads leave no room"), "{err}");
    // With nothing said it says what it would choose, and why.
    let (code, out, _) = call(folder.path(), &["--check"]);
    assert_eq!(code, 0);
    for what in ["chosen    N ", "chosen    NB ", "chosen    grid ", "chosen    threads "] {
        assert!(out.contains(what), "{out}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_bad_file_is_shown_with_line_and_caret() {
    let folder = tempfile::tempdir().unwrap();
    let dat = "t\nt\nHPL.out\n6\n1\n1e2   Ns\n1\n0 NBs\n0\n1\n1\n1\n16.0\n1\n2\n1\n4\n1\n2\n1\n1\n1\n1\n1\n0\n2\n64\n0\n0\n1\n8\n";
    std::fs::write(folder.path().join("HPL.dat"), dat).unwrap();
    let (code, out, err) = call(folder.path(), &[]);
    assert_eq!((code, out.as_str()), (2, ""));
    assert_eq!(
        err,
        "hpl-run: HPL.dat:6: N: `1e2` is not a whole number\n\
         \x20   6 | 1e2   Ns\n\
         \x20     | ^^^ write 100\n\
         hpl-run: HPL.dat:8: NB: 0: NB must be at least 1\n\
         \x20   8 | 0 NBs\n\
         \x20     | ^ write 1 or more\n\
         hpl-run: 2 errors in HPL.dat; nothing was run\n"
    );
}

#[test]
fn bad_flags_end_with_two() {
    let folder = tempfile::tempdir().unwrap();
    for args in [&["-N", "1e2"][..], &["--nonsense"], &["-P", "2"], &["no-such.dat"], &["--nb", "0"]] {
        let (code, out, err) = call(folder.path(), args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}");
        assert!(!err.is_empty());
    }
}

const DAT: &str = "t\nt\nself.dat\n8\n1\n40 Ns\n1\n8 NBs\n0\n1\n1\n1\n16.0\n1\n2\n1\n4\n1\n2\n1\n1\n1\n1\n1\n0\n2\n64\n0\n0\n1\n8\n";

fn names(folder: &Path) -> Vec<String> {
    let name = |e: std::io::Result<std::fs::DirEntry>| e.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = std::fs::read_dir(folder).unwrap().map(name).collect();
    names.sort();
    names
}

/// A report replaces neither what is read nor the other one, whatever the names.
#[test]
fn reports_replace_nothing_that_is_needed() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    std::fs::write(file("self.dat"), DAT).unwrap();
    std::fs::hard_link(file("self.dat"), file("hard")).unwrap();
    std::os::unix::fs::symlink("self.dat", file("soft")).unwrap();
    std::fs::write(file("x.partial"), DAT).unwrap();
    std::os::unix::fs::symlink("later", file("dangling")).unwrap();
    let before = names(folder.path());
    for args in [
        "self.dat",
        "self.dat --output ./self.dat",
        "--input self.dat --output - --json self.dat",
        "self.dat --output hard",
        "soft --output other --json hard",
        "x.partial --output x",
        "-N 40 --output later --json dangling",
        "-N 40 --output y --json y.partial",
        "-N 40 --output y.partial --json y",
    ] {
        for check in [false, true] {
            if check && args.contains("--json") {
                continue;
            }
            let args = args.split_whitespace().chain(check.then_some("--check")).collect::<Vec<_>>();
            let (code, out, err) = call(folder.path(), &args);
            assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {err}");
            assert!(err.contains("nothing was run; name another file"), "{err}");
            assert_eq!(names(folder.path()), before);
        }
    }
    assert_eq!(std::fs::read_to_string(file("self.dat")).unwrap(), DAT);
    assert_eq!(std::fs::read_to_string(file("x.partial")).unwrap(), DAT);
}

/// `--check` refuses what the run would, and leaves nothing.
#[test]
fn check_tries_the_outputs() {
    let folder = tempfile::tempdir().unwrap();
    for (to, code) in [("no/x", 2), (".", 2), ("x", 0)] {
        let (ended, out, err) = call(folder.path(), &["--check", "-N", "40", "--output", to]);
        assert_eq!(ended, code, "{to}: {err}");
        assert!(out.starts_with("1 run") && (code == 0 || err.contains("cannot be written")), "{out}{err}");
    }
    assert_eq!(names(folder.path()).len(), 0);
}

/// Runs a line of a shell, with the program as `$0`.
#[cfg(target_os = "linux")]
fn shell(folder: &Path, script: &str) -> (Option<i32>, String) {
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_hpl-run")]).current_dir(folder);
    let Output { status, stderr, .. } = command.output().unwrap();
    (status.code(), String::from_utf8_lossy(&stderr).into_owned())
}

/// `ulimit -f` is told as what it is, whether a report meets it or shared memory.
#[cfg(target_os = "linux")]
#[test]
fn a_limit_of_file_sizes_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let many = "exec $0 -q --threads 1 -N 20,21,22,23,24,25,26,27,28,29,30,31,32,33,34,35,36,37,38,39";
    for script in [
        format!("ulimit -f 8; {many} --output x.out --json x.json"),
        format!("ulimit -f 2; {many} --output - > x.stdout"),
        "ulimit -f 2; exec $0 -q -N 40 --threads 1 -P 1 -Q 2 --fabric shm --output -".to_string(),
    ] {
        let (code, said) = shell(folder.path(), &script);
        assert_eq!(code, Some(3), "{script}: {said}");
        assert!(said.contains("File too large"), "{said}");
    }
    assert!(names(folder.path()).contains(&"x.out.partial".to_string()));
}

/// Who has no stdout gets no report, and is told so.
#[cfg(target_os = "linux")]
#[test]
fn a_closed_stdout_is_told() {
    let folder = tempfile::tempdir().unwrap();
    for args in ["", "--json -", "--check"] {
        let (code, said) = shell(folder.path(), &format!("exec $0 -q --threads 1 -N 40 {args} >&-"));
        assert_eq!(code, Some(3), "{args}: {said}");
        assert!(said.contains("cannot be written: stdout is closed"), "{said}");
    }
    let (code, said) = shell(folder.path(), "exec $0 doctor --json >&-");
    assert!(code == Some(3) && said.contains("cannot be written: stdout is closed"), "{said}");
    let (code, said) = shell(folder.path(), "exec $0 -q --threads 1 -N 40 --output x >&-");
    assert_eq!((code, said.as_str()), (Some(0), ""));
    let (code, _) = shell(folder.path(), "exec $0 -q --threads 1 -N 40 1<>/dev/null");
    assert_eq!(code, Some(0));
}

/// Standard output has other names, and may be a file that has one: what was written there before is not lost.
#[cfg(target_os = "linux")]
#[test]
fn standard_outputs_have_many_names() {
    let folder = tempfile::tempdir().unwrap();
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    let run = "$0 -q --threads 1 -N 40";
    // Whether the JSON report is in `log`, or the table.
    for (script, json) in [
        ("RUN --json /dev/stdout >>log", true),
        ("RUN --json /proc/self/fd/1 >>log", true),
        ("RUN --json log >>log", true),
        ("RUN --json /dev/stderr 2>>log", true),
        ("RUN --json /dev/fd/5 5>>log", true),
        ("RUN --json /dev/fd/5 5>&1 >j | cat >>log", true),
        ("RUN --json /dev/stdout | cat >>log", true),
        ("RUN --output /dev/stdout >>log", false),
        ("RUN --output log >>log 2>&1", false),
        ("RUN --output /dev/stderr 2>>log", false),
        ("RUN --output /dev/fd/1 | cat >>log", false),
    ] {
        std::fs::write(folder.path().join("log"), "precious\n").unwrap();
        let (code, said) = shell(folder.path(), &script.replace("RUN", run));
        assert_eq!(code, Some(0), "{script}: {said}");
        let log = read("log");
        assert!(log.starts_with("precious\n"), "{script}: {log}");
        assert_eq!(log.contains("\"schema\":"), json, "{script}: {log}");
        assert!(json || log.contains("End of Tests."), "{script}: {log}");
        assert!(names(folder.path()).iter().all(|n| ["j", "log"].contains(&n.as_str())), "{script}");
    }
    let (code, said) = shell(folder.path(), &format!("{run} --json /dev/fd/77"));
    assert!(code == Some(2) && said.contains("/dev/fd/77: cannot be written"), "{said}");
}

/// `/tmp`: found before the first run, not after the last.
#[cfg(target_os = "linux")]
#[test]
fn what_another_user_alone_may_replace_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    let folder = tempfile::tempdir().unwrap();
    let set = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    set(folder.path(), 0o1777);
    std::fs::write(folder.path().join("x"), "old").unwrap();
    set(&folder.path().join("x"), 0o666);
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpl-run"));
    command.args(["-q", "-N", "40", "--threads", "1", "--output", "x"]);
    match command.current_dir(folder.path()).uid(65534).output() {
        Err(e) => println!("skipped: this test is not root, or its program is not for others: {e}"),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{said}");
            assert!(said.contains("x: cannot be written: it is another user's"), "{said}");
        }
    }
    assert_eq!(std::fs::read_to_string(folder.path().join("x")).unwrap(), "old");
    assert_eq!(names(folder.path()), ["x"]);
}

/// A flag over the file's device is all that is said.
#[test]
fn where_the_report_goes_is_told_once() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("d"), DAT).unwrap();
    let (code, _, err) = call(folder.path(), &["d", "--threads", "1"]);
    assert!(code == 0 && err.contains("device 8: the report goes to"), "{err}");
    let (code, _, err) = call(folder.path(), &["d", "--threads", "1", "--output", "other"]);
    assert!(code == 0 && !err.contains("goes to") && err.contains("the report is in other"), "{err}");
}

/// Files of a bundle are opened before the first run, and by one job at a time.
#[test]
fn a_bundle_that_cannot_be_written_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("be/cert-40-hpl.tstamps")).unwrap();
    let (code, _, err) = call(folder.path(), &["-q", "-N", "40", "--threads", "1", "--bundle", "be"]);
    assert!(code == 2 && err.contains("hpl.tstamps: cannot be written: it is a folder"), "{err}");
    assert_eq!(names(&folder.path().join("be")), ["cert-40-hpl.tstamps"]);
    let (code, _, err) = call(folder.path(), &["-q", "-N", "40", "--output", "no/"]);
    assert!(code == 2 && err.contains("it is a folder's name"), "{err}");
}

/// What has no end is not read until memory is full.
#[cfg(target_os = "linux")]
#[test]
fn a_file_without_an_end_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for script in [
        "exec $0 /dev/zero",
        "exec $0 doctor --with /dev/zero",
        "exec $0 doctor --matrix /dev/zero",
        "exec ${0%/*}/fulmen-run --hostfile /dev/zero true",
    ] {
        let (code, said) = shell(folder.path(), script);
        assert!(code == Some(2) && said.contains("cannot be read: it is larger than"), "{script}: {said}");
    }
}

/// What a file of another host does not tell is not taken for nothing.
#[test]
fn facts_of_no_host_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a"), r#"{"schema": "fulmen.doctor/1", "hosts": []}"#).unwrap();
    let (code, _, err) = call(folder.path(), &["doctor", "--with", "a"]);
    assert!(code == 2 && err.contains("--with: a: tells of no host"), "{err}");
}

/// Daemons start programs with signals ignored or held back.
#[cfg(target_os = "linux")]
#[test]
fn children_that_end_are_heard_whatever_the_parent_ignores() {
    let folder = tempfile::tempdir().unwrap();
    for script in [
        "exec $0 -q -N 100 -P 1 -Q 2 --threads 1 --fabric shm",
        "exec ${0%/*}/fulmen-run -n 2 $0 -q -N 100 -P 1 -Q 2 --threads 1",
    ] {
        let (code, said) = shell(folder.path(), &format!("trap '' CHLD; {script}"));
        assert_eq!(code, Some(0), "{script}: {said}");
    }
}
