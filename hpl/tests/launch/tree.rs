//! Many hosts: agents that start agents. The hosts are this machine behind a stub of ssh, which notes who calls it.

use std::collections::HashMap;
use std::io::Write;
use std::time::Instant;

use crate::bench::{Bench, HANG, SLEEP, all_gone, parent, signal_to};

const HOSTS: usize = 24;
const NAMES: &str = "n[01-24]";

/// An ssh that runs the command on this machine as that host, and notes it beside the caller's host.
fn ssh(bench: &Bench) -> String {
    let lines =
        "host=$1; shift; echo \"${AT:-top} $host\" >>$BENCH/calls; export AT=$host; exec sh -c \"$*\"";
    bench.script("stub", lines)
}

/// For each caller the hosts that it has called.
fn calls(bench: &Bench) -> HashMap<String, Vec<String>> {
    let mut calls = HashMap::<String, Vec<String>>::new();
    for line in std::fs::read_to_string(bench.path("calls")).unwrap().lines() {
        let (by, host) = line.split_once(' ').unwrap();
        calls.entry(by.into()).or_default().push(host.into());
    }
    calls
}

#[test]
fn no_host_calls_more_than_it_may_and_all_are_reached() {
    let bench = Bench::new();
    let program = ["sh", "-c", "echo $FULMEN_RANK $AT; echo to $AT >&2; [ $FULMEN_RANK != 0 ] || cat"];
    let mut started = {
        let ssh = ssh(&bench);
        let args = ["--ssh", &ssh, "--fan-out", "3", "--host", NAMES, "--start-timeout", "50"];
        bench.start(&[&args[..], &program].concat())
    };
    started.0.stdin.take().unwrap().write_all(b"what was put in\n").unwrap();
    let ended = started.end();
    ended.expect(0, &["to n01\n", "to n24\n"]);
    let mut wanted: Vec<String> = (0..HOSTS).map(|rank| format!("{rank} n{:02}", rank + 1)).collect();
    wanted.push("what was put in".into());
    wanted.sort_unstable();
    assert_eq!(ended.sorted(), wanted);
    let calls = calls(&bench);
    assert_eq!(calls["top"].len(), 3, "{calls:?}");
    assert!(calls.len() > 4 && calls.values().all(|hosts| hosts.len() <= 3), "{calls:?}");
    let mut hosts: Vec<&String> = calls.values().flatten().collect();
    hosts.sort_unstable();
    hosts.dedup();
    assert_eq!(hosts.len(), HOSTS);
    assert_eq!(calls.values().flatten().count(), HOSTS, "each once");
}

#[test]
fn the_program_is_copied_down_the_tree() {
    let bench = Bench::new();
    let far = bench.path("far");
    std::fs::create_dir(&far).unwrap();
    let ssh = bench.script("stub", "shift; TMPDIR=$BENCH/far exec sh -c \"$*\"");
    let program = bench.script("prog", "echo $0 $1");
    let args = ["--ssh", &ssh, "--fan-out", "1", "--start-timeout", "50", "--host", "a,b,c"];
    let ended = bench.run(&[&args[..], &["--copy", &program, "x"]].concat());
    ended.expect(0, &[]);
    let mut lines = ended.sorted();
    lines.dedup();
    assert!(lines.len() == 3 && lines.iter().all(|l| l.starts_with(&far.display().to_string())), "{ended:?}");
    assert_eq!(std::fs::read_dir(&far).unwrap().count(), 0, "{ended:?}");
}

/// A host deep in the tree that does not let us in is named, with ssh's words, and nothing is started.
#[test]
fn a_host_below_others_that_refuses() {
    let bench = Bench::new();
    let ssh = bench.script(
        "stub",
        "host=$1; shift; case $host in n07) echo 'u@n07: Permission denied (publickey).' >&2; exit 255;; esac\n\
         exec sh -c \"$*\"",
    );
    let args = ["--ssh", &ssh, "--fan-out", "2", "--start-timeout", "50", "--host", "n[01-10]"];
    let ended = bench.run(&[&args[..], &["sh", "-c", "echo started"]].concat());
    ended.expect(
        4,
        &[
            "n07: no agent could be started",
            "u@n07: Permission denied (publickey).",
            "ssh was called on n06, for there are many hosts (--fan-out)",
        ],
    );
    assert_eq!(ended.out, "", "a rank was started: {ended:?}");
}

/// n01 calls n02 (which calls n03) and n04; n05 calls n06 (which calls n07) and n08.
fn start(bench: &Bench) -> (crate::bench::Started, Vec<u32>) {
    let ssh = ssh(bench);
    let args =
        ["--ssh", &ssh, "--fan-out", "2", "--start-timeout", "50", "--host", "n[01-08]", "--silence", "6"];
    let started = bench.start(&[&args[..], &["sh", "-c", SLEEP]].concat());
    let mut pids = bench.pids(16);
    let agents: Vec<u32> = (0..8).map(|rank| parent(rank_pid(bench, rank))).collect();
    pids.extend(agents);
    (started, pids)
}

fn rank_pid(bench: &Bench, rank: usize) -> u32 {
    let text = std::fs::read_to_string(bench.path(&format!("pid.{rank}"))).unwrap();
    text.trim().parse().unwrap()
}

#[test]
fn the_end_comes_to_all() {
    // The agent of n05, with three others below; a rank at the end; the launcher itself.
    for (what, signal) in [
        ("agent", libc::SIGKILL),
        ("agent", libc::SIGSTOP),
        ("rank", libc::SIGKILL),
        ("launcher", libc::SIGINT),
        ("launcher", libc::SIGKILL),
    ] {
        let bench = Bench::new();
        let (mut started, pids) = start(&bench);
        let agent = parent(rank_pid(&bench, 4));
        match what {
            "agent" => signal_to(agent, signal),
            "rank" => signal_to(rank_pid(&bench, 6), signal),
            _ => started.signal(signal),
        }
        let began = Instant::now();
        if (what, signal) == ("launcher", libc::SIGKILL) {
            started.0.wait().unwrap();
        } else {
            let ended = started.end();
            match (what, signal) {
                ("agent", libc::SIGKILL) => {
                    ended.expect(4, &["n05: the connection to its agent ended", "3 further hosts"]);
                }
                ("agent", _) => {
                    ended.expect(4, &["n05: its agent fell silent", "nothing was heard of it for"])
                }
                ("rank", _) => ended.expect(4, &["rank 6 (n07, pid ", "was killed by signal 9 (SIGKILL)"]),
                _ => ended.expect(5, &["interrupted"]),
            }
        }
        all_gone(&pids);
        println!("{what}, signal {signal}: all gone after {:.1?}", began.elapsed());
        assert!(began.elapsed() < HANG);
    }
}

/// More output than anything on the way holds, from hosts below others.
#[test]
fn output_comes_up_whole() {
    let bench = Bench::new();
    let ssh = ssh(&bench);
    let lines = 40_000;
    let program = format!(
        "i=0; while [ $i -lt {lines} ]; do echo $FULMEN_RANK a line of some length; i=$((i+1)); done"
    );
    let args = ["--ssh", &ssh, "--fan-out", "1", "--start-timeout", "50", "--host", "a,b,c"];
    let ended =
        bench.run(&[&args[..], &["--output-dir", "o", "--output", "none", "sh", "-c", &program]].concat());
    ended.expect(0, &[]);
    for rank in 0..3 {
        let text = std::fs::read_to_string(bench.path(&format!("o/rank.{rank}.out"))).unwrap();
        assert_eq!(text.matches(&format!("{rank} a line of some length\n")).count(), lines);
    }
}

/// Nobody reaches the host of a stopped agent: what it has started ends, and so does the agent.
#[test]
fn a_stopped_agent_out_of_reach() {
    let bench = Bench::new();
    // The end of ssh does not end the agent, and the second call of a host, which is to do that, does not get through.
    let ssh = bench.script(
        "stub",
        "host=$1; shift; [ -e $BENCH/called.$host ] && exec sleep 60; : >$BENCH/called.$host; setsid sh -c \"$*\"",
    );
    let started = bench.start(&["--ssh", &ssh, "--host", "a,b", "--silence", "6", "sh", "-c", SLEEP]);
    let mut pids = bench.pids(4);
    let agents = [0, 1].map(|rank| parent(rank_pid(&bench, rank)));
    signal_to(agents[1], libc::SIGSTOP);
    started.end().expect(4, &["b: its agent fell silent", "nothing was heard of it for"]);
    pids.extend(agents);
    all_gone(&pids);
}
