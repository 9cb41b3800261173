//! What `hpl-run` says of memory is so: what it admits runs, under whatever limit.

use std::process::{Command, Output};

use super::cgroup::Cgroup;

/// A call of `hpl-run` in a folder of its own: its exit code (128 and more: a signal), and what it said.
fn call(mut command: Command) -> (i32, String) {
    let folder = tempfile::tempdir().unwrap();
    let Output { status, stderr, .. } = command.current_dir(folder.path()).output().unwrap();
    let code = status
        .code()
        .unwrap_or_else(|| 128 + std::os::unix::process::ExitStatusExt::signal(&status).unwrap());
    (code, String::from_utf8_lossy(&stderr).into_owned())
}

/// Far too large an N is refused for `reason`, and the N that is advised runs.
fn what_is_advised_runs(what: &str, reason: &str, command: impl Fn(&str) -> Command) {
    let (code, said) = call(command("-q -N 60000"));
    assert_eq!(code, 3, "{what}: {said}");
    assert!(said.contains(reason), "{what}: {said}");
    let advised =
        said.split("N up to ").nth(1).and_then(|s| s.split(' ').next()).and_then(|n| n.parse::<usize>().ok());
    let n = advised.unwrap_or_else(|| panic!("{what}: {said}"));
    let (code, said) = call(command(&format!("-q -N {n}")));
    assert_eq!(code, 0, "{what}, N {n}: {said}");
}

/// Without any margin an advised size, or one that is chosen, would be killed.
#[test]
fn a_cgroup_holds_what_it_is_said_to_hold() {
    for (mib, args) in [(24, ""), (120, "--nb 512 --depth 2"), (120, "-P 2 -Q 2 --nb 64 --fabric shm")] {
        let Some(group) = Cgroup::new(mib << 20) else { return };
        let what = format!("{mib} MiB, {args}");
        let command = |more: &str| {
            let mut command = group.command(env!("CARGO_BIN_EXE_hpl-run"));
            command
                .args(args.split_whitespace())
                .args(more.split_whitespace())
                .args(["--output", "/dev/null"]);
            command
        };
        let reason = format!("memory limit of this container or cgroup: {mib}.0 MiB");
        what_is_advised_runs(&what, &reason, command);
        if args.is_empty() {
            let (code, said) = call(command("-q"));
            assert_eq!((code, said.as_str()), (0, ""), "{what}");
        }
    }
}

/// `ulimit -v` counts every segment that a process maps, `ulimit -d` what is its own.
#[cfg(target_env = "gnu")]
#[test]
fn limits_of_a_process_hold_what_they_are_said_to_hold() {
    for (limit, mib, args) in [("-v", 900, "-P 1 -Q 2 --threads 1 --fabric shm"), ("-d", 120, "--threads 2")]
    {
        what_is_advised_runs(
            &format!("ulimit {limit}, {mib} MiB, {args}"),
            &format!("ulimit {limit}"),
            |more| {
                let mut command = Command::new("sh");
                let script =
                    format!("ulimit {limit} {} && exec \"$0\" {args} {more} --output /dev/null", mib << 10);
                command.args(["-c", &script, env!("CARGO_BIN_EXE_hpl-run")]);
                command.env("RUST_BACKTRACE", "1"); // with it, the standard library hangs when memory has run out
                command
            },
        );
    }
}

/// The size that hpl-run chooses by itself fits into what `ulimit -v` leaves when its threads have taken their share.
#[cfg(target_env = "gnu")]
#[test]
fn the_chosen_size_fits_under_an_address_space_limit() {
    let folder = tempfile::tempdir().unwrap();
    let cores = std::thread::available_parallelism().unwrap().get();
    let script = r#"ulimit -v "$1" && exec "$0" -q"#;
    for (mib, code) in [((cores + 3) * 66 + 160, 0), (200, 3), (64, 3)] {
        let out = Command::new("sh")
            .args(["-c", script, env!("CARGO_BIN_EXE_hpl-run"), &(mib << 10).to_string()])
            .env("RUST_BACKTRACE", "1") // with it, the standard library hangs when memory has run out
            .current_dir(folder.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{mib} MiB: {said}");
        assert!(code == 0 || said.contains("ulimit -v"), "{said}");
    }
}
