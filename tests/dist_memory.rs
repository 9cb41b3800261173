//! Case K5-05 in earnest: a process with a limit is told what is needed and what there is, and lives on.
#![cfg(target_os = "linux")]

use std::process::Command;

use fulmen::dist::{Desc, DistMatrix};
use fulmen::fabric::mem;
use fulmen::{Error, Grid};

const LIMITED: &str = "FULMEN_TEST_LIMITED";

#[test]
fn n_40000_is_refused_within_2_gib_before_anything_is_touched() {
    let exe = std::env::current_exe().unwrap();
    let script = r#"ulimit -v 2097152 && exec "$0" --ignored --exact --nocapture the_limited_process"#;
    let out = Command::new("sh").arg("-c").arg(script).arg(exe).env(LIMITED, "1").output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}{}", String::from_utf8_lossy(&out.stderr));
    assert!(text.contains("refused: a matrix of 40000 x 40000 needs 11.9 GiB"), "{text}");
    let peak = text.lines().find_map(|l| l.strip_prefix("peak KiB: ")).unwrap();
    assert!(peak.parse::<u64>().unwrap() < 256 << 10, "{peak} KiB were touched");
}

#[test]
#[ignore = "the other side of n_40000_is_refused_within_2_gib_before_anything_is_touched"]
fn the_limited_process() {
    if std::env::var_os(LIMITED).is_none() {
        return;
    }
    for outcome in mem::run(2, mem::Options::default(), |fabric| {
        let grid = Grid::squarest(fabric)?;
        match DistMatrix::<f64>::zeros(&grid, Desc::square_blocks(40_000, 40_000, 256)) {
            Err(e @ Error::Resources { .. }) if grid.all().me() == 0 => println!("refused: {e}"),
            Err(Error::Resources { .. }) => {}
            other => panic!("{other:?}"),
        }
        // What fits, works afterwards.
        let a = DistMatrix::from_fn(&grid, Desc::square_blocks(1000, 1000, 64), |i, j| (i + j) as f64)?;
        fulmen::blas::norm::max(&a.view())
    }) {
        assert_eq!(outcome.unwrap(), 1998.0);
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    println!("peak KiB: {}", peak.trim().trim_end_matches(" kB"));
}
