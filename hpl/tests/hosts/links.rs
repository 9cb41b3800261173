//! What becomes of a job when a link between two of its hosts does: it is told as what was seen, where, and once.

use std::time::Duration;

use crate::lab::{Ended, HPL, Job, Lab};

/// A job that lasts for longer than anything here.
fn long(lab: &Lab, options: &[&str]) -> Job {
    let run = [
        "--host",
        "h1,h2,h3",
        HPL,
        "-N",
        "4000,4000,4000",
        "--nb",
        "32",
        "-P",
        "1",
        "-Q",
        "3",
        "--threads",
        "1",
        "--output",
        "/dev/null",
    ];
    let mut job = lab.start(&[options, &run[..]].concat());
    assert!(job.until("   grid 1x3"), "{}", job.so_far());
    job
}

const SHORT: [&str; 12] = [
    "--host",
    "h1,h2,h3",
    HPL,
    "-N",
    "100",
    "--nb",
    "32",
    "--threads",
    "1",
    "--output",
    "/dev/null",
    "--hash",
];

/// Nobody says what nobody knows, and nothing is left.
fn no_word_of(ended: &Ended, words: &[&str]) {
    for word in words {
        assert!(!ended.err.contains(word), "`{word}` in {ended:?}");
    }
}

#[test]
fn what_is_seen_of_a_link_is_told() {
    let Some(lab) = Lab::up(3, "switch") else { return };
    let nothing_left = || assert_eq!(lab.left_over(Duration::from_secs(20)), Vec::<String>::new());

    // A firewall resets the connection of two hosts that work.
    let job = long(&lab, &[]);
    std::thread::sleep(Duration::from_millis(300));
    lab.cut(2, "en0", "reset:192.168.77.3");
    let ended = job.end();
    ended.expect(
        4,
        &[
            "rank 1 (h2, tcp over en0 (192.168.77.3 to 192.168.77.2)) is out of reach: the connection to it broke \
             (connection reset)",
            "noticed by rank 2 (h3)",
        ],
    );
    no_word_of(&ended, &["killed", "rank 0 (h1, tcp", "192.168.77.1", "interrupted"]);
    lab.heal(2, "en0");
    nothing_left();

    // A cable is pulled: the one cause, with the link and what was waited for or done.
    let mut job = long(&lab, &["--silence", "3"]);
    std::thread::sleep(Duration::from_millis(300));
    lab.cut(3, "en0", "down");
    assert!(!job.is_over());
    let ended = job.end();
    let lost = "h3: its agent fell silent, and with it rank 2";
    ended.expect(4, &[lost, "its link to rank 2 is tcp over en0 (192.168.77.", " to 192.168.77.3); "]);
    assert!(["); in panel ", "); while "].iter().any(|phase| ended.err.contains(phase)), "{ended:?}");
    assert_eq!(ended.err.matches(lost).count(), 1, "{ended:?}");
    no_word_of(&ended, &["interrupted"]);
    lab.heal(3, "en0");
    nothing_left();

    // A firewall between two hosts of one network: a third passes on what goes between them, which is told with its cost.
    for (how, seen) in [("reset", "Connection refused"), ("drop", "timed out")] {
        lab.cut(2, "en0", &format!("{how}:192.168.77.3"));
        let ended = lab.run(&SHORT);
        let warned: Vec<&str> = ended.err.lines().filter(|line| line.contains("warning: rank 1")).collect();
        assert_eq!(warned.len(), 1, "{ended:?}");
        for word in [
            "rank 1 (h2) and rank 2 (h3): tcp over en0 (192.168.77.3 to 192.168.77.2): ",
            seen,
            "a firewall?",
            "each byte crosses 2 links; using tcp through rank 0 (h1)",
        ] {
            assert!(warned[0].contains(word), "no `{word}` in {ended:?}");
        }
        ended.expect(0, &["PASSED"]);
        lab.heal(2, "en0");
    }
}
