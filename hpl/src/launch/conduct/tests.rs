use fulmen::job::messages::{LONGEST_WORD, Sight};

use super::*;

const LIMITS: Limits =
    Limits { start: Duration::from_secs(9), meet: Duration::from_secs(60), bound: Duration::from_secs(10) };

/// Ranks 0, 1 on a, rank 2 on b, rank 3 on c.
fn job(now: Instant) -> Conduct {
    reached(None, now)
}

/// The same, with c reached through another host.
fn reached(above: Option<usize>, now: Instant) -> Conduct {
    let plan =
        |name: &str, ranks: &[usize], above| HostPlan { name: name.into(), ranks: ranks.to_vec(), above };
    let plans = vec![plan("a", &[0, 1], None), plan("b", &[2], None), plan("c", &[3], above)];
    Conduct::new(plans, LIMITS, now)
}

fn running(now: Instant) -> Conduct {
    started(job(now), now)
}

fn started(mut job: Conduct, now: Instant) -> Conduct {
    for host in 0..3 {
        let acts = job.hear(host, News::Ready { pid: 1, notes: vec![] }, now);
        assert_eq!(acts, if host == 2 { vec![Act::TellAll(Order::Go)] } else { vec![] });
    }
    for (rank, host) in [0, 0, 1, 2].into_iter().enumerate() {
        job.hear(host, News::Started { rank: rank as u32, pid: 100 + rank as u32 }, now);
    }
    job
}

fn ended(rank: u32, how: How, asked: bool) -> News {
    News::Ended { rank, how, asked, held: false }
}

fn failed(rank: u32, code: u8, follows: bool, words: &str) -> News {
    News::Failed { rank, complaint: Complaint { code, follows, heard: false, words: words.into() } }
}

/// What another rank has told this one.
fn heard(rank: u32, words: &str) -> News {
    News::Failed { rank, complaint: Complaint { code: 4, follows: true, heard: true, words: words.into() } }
}

fn ends(acts: &[Act]) -> bool {
    matches!(acts, [Act::TellAll(Order::End(Ending { code, .. }))] if *code > 0)
}

#[test]
fn who_has_seen_a_loss_is_named_and_not_who_was_told() {
    let now = Instant::now();
    let mut job = running(now);
    // Rank 0 has said itself what it has heard.
    assert!(ends(&job.hear(0, heard(0, ""), now)));
    job.hear(0, heard(1, "rank 2 ended the job: rank 3 was silent"), now);
    job.hear(1, failed(2, 4, true, "rank 3 was silent for 5.0 s"), now);
    let words = job.verdict().words.unwrap();
    assert!(words.contains("rank 2 (b, pid 102): rank 3 was silent"), "{words}");
}

#[test]
fn all_goes_well() {
    let now = Instant::now();
    let mut job = running(now);
    for (rank, host) in [(0, 0), (1, 0), (2, 1)] {
        assert_eq!(job.hear(host, ended(rank, How::Code(0), false), now), []);
    }
    let last = job.hear(2, ended(3, How::Code(0), false), now);
    assert!(matches!(&last[..], [Act::TellAll(Order::End(Ending { code: 0, .. }))]));
    for host in 0..3 {
        assert!(!job.is_over());
        assert_eq!(job.lost(host, "", false, now), []);
    }
    assert!(job.is_over());
    assert_eq!(job.verdict(), Verdict { code: 0, words: None });
}

#[test]
fn nothing_starts_unless_every_host_can() {
    let now = Instant::now();
    let mut job = job(now);
    job.hear(0, News::Ready { pid: 1, notes: vec![] }, now);
    assert!(ends(&job.lost(1, "ssh: Could not resolve hostname b\nexit status 255", false, now)));
    assert_eq!(job.lost(2, "Permission denied (publickey).\nexit status 255", false, now), []);
    assert_eq!(job.lost(0, "", false, now), []);
    let verdict = job.verdict();
    assert_eq!(verdict.code, 4);
    let words = verdict.words.unwrap();
    assert!(words.contains("b: no agent could be started\n    ssh: Could not resolve hostname b"), "{words}");
    assert!(words.contains("c: no agent could be started\n    Permission denied"), "{words}");
}

/// Who has said why he cannot take part, and who has been told to leave before he was ready, did start.
#[test]
fn who_refuses_is_no_agent_that_was_not_started() {
    let now = Instant::now();
    let mut job = job(now);
    assert!(ends(&job.hear(1, News::Refused(Ending::new(2, "--wdir: /x: there is no such folder")), now)));
    for (host, words) in [(1, "exit status 0"), (2, "exit status 0"), (0, "exit status 0")] {
        assert_eq!(job.lost(host, words, true, now), []);
    }
    let verdict = job.verdict();
    assert_eq!((verdict.code, verdict.words.unwrap()), (2, "b: --wdir: /x: there is no such folder".into()));
}

/// Of a host that is lost the others tell link and phase: who waits for it before who does not, and nobody but of a lost host.
#[test]
fn a_lost_host_is_told_with_link_and_phase() {
    let now = Instant::now();
    let sees = |rank, waits, words: &str| News::Sees { rank, sight: Sight { waits, words: words.into() } };
    let mut job = running(now);
    let later = now + Duration::from_secs(6);
    let mut acts = vec![];
    for ms in (0..=6000).step_by(10) {
        let at = now + Duration::from_millis(ms);
        acts.extend(job.tick(at, &[at, now, at]));
    }
    let told =
        |act: &Act| matches!(act, Act::TellAll(Order::End(Ending { code: 4, lost, .. })) if *lost == [2]);
    assert!(acts.iter().any(told), "{acts:?}");
    job.hear(0, sees(1, false, "its link to rank 2 is tcp over en1; in panel 3 of 9"), later);
    job.hear(
        2,
        sees(3, true, "its link to rank 2 is tcp over en0; in panel 2 of 9, waiting for put 7"),
        later,
    );
    job.hear(0, sees(0, true, "too late"), later);
    let words = job.verdict().words.unwrap();
    assert!(
        words.starts_with("b: its agent fell silent, and with it rank 2\n    nothing was heard of it for "),
        "{words}"
    );
    assert!(
        words.ends_with(
            "\n    of rank 3 (c, pid 103): its link to rank 2 is tcp over en0; in panel 2 of 9, waiting for put 7"
        ),
        "{words}"
    );
    let mut job = running(now);
    job.hear(1, ended(2, How::Signal(9), false), now);
    job.hear(0, sees(0, true, "nothing"), now);
    assert!(!job.verdict().words.unwrap().contains("nothing"));
}

#[test]
fn an_agent_that_does_not_answer_in_time() {
    let now = Instant::now();
    let mut job = job(now);
    for host in [0, 2] {
        job.hear(host, News::Ready { pid: 1, notes: vec![] }, now);
    }
    let later = |s: u64| now + Duration::from_secs(s);
    let mut all = vec![];
    for s in 1..=10 {
        all.extend(job.tick(later(s), &[later(s); 3]));
    }
    assert!(
        all.contains(&Act::Cut(1)) && all.iter().any(|a| matches!(a, Act::TellAll(Order::End(_)))),
        "{all:?}"
    );
    assert!(job.verdict().words.unwrap().contains("b: no answer from its agent within 9.0 s"));
}

/// The peer's complaint comes before the news of the kill: the kill is told.
#[test]
fn the_cause_is_told_and_not_what_follows_from_it() {
    let now = Instant::now();
    let mut job = running(now);
    assert!(ends(&job.hear(0, failed(1, 4, true, "rank 3 is gone"), now)));
    assert_eq!(job.hear(0, ended(1, How::Code(4), false), now), []);
    assert_eq!(job.hear(0, ended(0, How::Code(4), false), now), []);
    assert_eq!(job.hear(2, ended(3, How::Signal(9), false), now), []);
    assert_eq!(job.hear(1, ended(2, How::Signal(15), true), now), []);
    let verdict = job.verdict();
    assert_eq!(verdict.code, 4);
    assert!(verdict.words.unwrap().starts_with("rank 3 (c, pid 103) was killed by signal 9 (SIGKILL)"));
}

/// The peers' complaint comes before the end of the agent's connection; ranks that are told to end repeat what they are told.
#[test]
fn a_killed_agent_is_told_and_who_noticed() {
    let now = Instant::now();
    let mut job = running(now);
    let gone = "rank 2 (b, tcp over en0) is gone in panel 2 of 47, waited for by rank 3";
    assert!(ends(&job.hear(2, failed(3, 4, true, gone), now)));
    job.hear(0, failed(0, 4, true, &format!("rank 3 (c, pid 103): {gone}")), now);
    assert_eq!(job.lost(1, "signal: 9 (SIGKILL)", false, now), []);
    let words = job.verdict().words.unwrap();
    let want = "b: the connection to its agent ended, and with it rank 2\n    signal: 9 (SIGKILL)\n    noticed by rank 3 (c, pid 103): ";
    assert!(words.starts_with(want) && words.ends_with(gone), "{words}");
    // An agent that leaves in order is not missed.
    let mut job = running(now);
    job.hear(2, failed(3, 3, false, "no memory"), now);
    job.hear(1, ended(2, How::Code(4), true), now);
    assert_eq!(job.lost(1, "exit status 0", true, now), []);
    assert_eq!(job.verdict().words.unwrap(), "rank 3 (c, pid 103): no memory");
}

/// A rank that only passes on another's words may be heard first, and has noticed nothing.
#[test]
fn who_repeats_the_cause_is_not_told() {
    let now = Instant::now();
    let mut job = running(now);
    let words = "fabric: verbs: rank 2 (b): rdma_en10: the port is down\n    reseat the cable";
    assert!(ends(&job.hear(0, failed(0, 3, true, words), now)));
    job.hear(1, failed(2, 3, false, words), now);
    let words = Some(format!("rank 2 (b, pid 102): {words}"));
    assert_eq!(job.verdict(), Verdict { code: 3, words });
}

#[test]
fn the_exit_code_is_the_failing_ranks() {
    let now = Instant::now();
    let mut job = running(now);
    assert!(ends(&job.hear(1, ended(2, How::Code(7), false), now)));
    job.hear(0, ended(0, How::Code(3), false), now);
    let verdict = job.verdict();
    assert_eq!(verdict.code, 7);
    assert!(verdict.words.unwrap().starts_with("rank 2 (b, pid 102) ended with exit code 7"));
    let mut job = running(now);
    assert!(ends(&job.hear(1, failed(2, 3, false, "no memory"), now)));
    job.hear(1, ended(2, How::Code(3), false), now);
    assert_eq!(job.verdict(), Verdict { code: 3, words: Some("rank 2 (b, pid 102): no memory".into()) });
}

#[test]
fn a_silent_host_is_cut_and_named_with_its_ranks() {
    let now = Instant::now();
    let mut job = running(now);
    let at = |ms: u64| now + Duration::from_millis(ms);
    let mut ms = 0;
    let acts = loop {
        ms += 500;
        let acts = job.tick(at(ms), &[at(ms), at(ms), now]);
        if !acts.is_empty() {
            break acts;
        }
        assert!(ms < 6000);
    };
    assert_eq!(acts[0], Act::Cut(2));
    assert!(ends(&acts[1..]));
    let words = job.verdict().words.unwrap();
    assert!(
        words.starts_with("c: its agent fell silent, and with it rank 3\n    nothing was heard of it for 5."),
        "{words}"
    );
}

/// The launcher's own cable is out: it hears of nobody but the agent beside it.
#[test]
fn the_launchers_own_network() {
    let now = Instant::now();
    let mut job = running(now);
    let mut at = now;
    while at - now < Duration::from_secs(6) {
        at += Duration::from_millis(500);
        job.tick(at, &[at, now, now]);
    }
    let words = job.verdict().words.unwrap();
    assert!(words.contains(", nor of c: ") && words.contains("this host's own network"), "{words}");
}

#[test]
fn a_launcher_that_was_stopped_does_not_blame_others() {
    let now = Instant::now();
    let mut job = running(now);
    assert_eq!(job.tick(now + Duration::from_millis(500), &[now; 3]), []);
    assert_eq!(job.tick(now + Duration::from_secs(3600), &[now; 3]), []);
    assert_eq!(job.tick(now + Duration::from_secs(3601), &[now; 3]), []);
}

#[test]
fn a_rank_that_does_not_come_to_the_rendezvous() {
    let now = Instant::now();
    let mut job = running(now);
    for (rank, host) in [(0, 0), (1, 0), (3, 2)] {
        job.hear(host, News::Gather { rank, round: 0, bytes: vec![rank as u8] }, now);
    }
    let mut at = now;
    let mut next = || loop {
        at += Duration::from_secs(2);
        let acts = job.tick(at, &[at; 3]);
        if !acts.is_empty() {
            break acts;
        }
    };
    let told = "others wait for rank 2 (b, pid 102) at the rendezvous, for 60 s at most";
    assert_eq!(next(), [Act::Say(told.into())], "after a while, once");
    assert!(ends(&next()));
    let words = job.verdict().words.unwrap();
    assert!(words.starts_with("rank 2 (b, pid 102) did not come to the rendezvous within 60 s"), "{words}");
}

#[test]
fn words_are_gathered_by_rank_and_lies_end_the_job() {
    let now = Instant::now();
    let mut job = running(now);
    for (rank, host) in [(3, 2), (1, 0), (0, 0)] {
        assert_eq!(job.hear(host, News::Gather { rank, round: 0, bytes: vec![rank as u8] }, now), []);
    }
    // Of a rank that is not this agent's.
    assert_eq!(job.hear(0, News::Gather { rank: 2, round: 0, bytes: vec![9] }, now), []);
    let acts = job.hear(1, News::Gather { rank: 2, round: 0, bytes: vec![2] }, now);
    let parts = vec![vec![0], vec![1], vec![2], vec![3]];
    assert_eq!(acts, [Act::TellAll(Order::Gathered { round: 0, parts })]);
    assert_eq!(job.hear(0, News::Gather { rank: 0, round: 1, bytes: vec![0] }, now), []);
    assert!(
        ends(&job.hear(0, News::Gather { rank: 0, round: 1, bytes: vec![0] }, now)),
        "twice in one round"
    );
    for (round, len) in [(9, 0), (1, LONGEST_WORD + 1)] {
        let mut job = running(now);
        job.hear(0, News::Gather { rank: 1, round: 1, bytes: vec![] }, now);
        assert!(ends(&job.hear(0, News::Gather { rank: 0, round, bytes: vec![0; len] }, now)));
    }
}

#[test]
fn signals() {
    let now = Instant::now();
    let mut job = running(now);
    assert!(ends(&job.signal("interrupted", now)));
    job.hear(2, ended(3, How::Signal(9), false), now);
    assert_eq!(job.signal("interrupted", now), [Act::TellAll(Order::Kill)]);
    let acts = job.tick(now + Duration::from_millis(1500), &[now; 3]);
    assert_eq!(acts.iter().filter(|a| matches!(a, Act::Cut(_))).count(), 3);
    assert!(job.is_over());
    assert_eq!(job.verdict(), Verdict { code: 5, words: Some("interrupted".into()) });
}

#[test]
fn what_does_not_end_is_killed_then_left_within_the_bound() {
    let now = Instant::now();
    let mut job = running(now);
    job.signal("interrupted", now);
    let (mut at, mut killed) = (now, None);
    while !job.is_over() {
        at += Duration::from_millis(100);
        for act in job.tick(at, &[at; 3]) {
            if act == Act::TellAll(Order::Kill) {
                killed = Some(at - now);
            }
        }
        assert!(at - now < LIMITS.bound / 2, "with the silence before it, all must fit into the bound");
    }
    assert!(killed.is_some_and(|t| t >= 2 * grace(LIMITS.bound)));
}

/// An agent that has started others is lost: they are gone with it, and it alone is named.
#[test]
fn agents_below_one_that_is_lost() {
    let now = Instant::now();
    let mut job = started(reached(Some(1), now), now);
    assert!(ends(&job.lost(1, "signal: 9 (SIGKILL)", false, now)));
    assert_eq!(job.lost(2, "late", false, now), []);
    job.lost(0, "", false, now);
    assert!(job.is_over());
    let words = job.verdict().words.unwrap();
    let want = "b: the connection to its agent ended, and with it ranks 2 to 3\n    signal: 9 (SIGKILL)\n    1 further host";
    assert!(words.starts_with(want) && !words.contains("c:"), "{words}");
    // Silent, both; the one below was heard a little longer ago.
    let mut job = started(reached(Some(1), now), now);
    let (mut at, mut acts) = (now, vec![]);
    while acts.is_empty() {
        at += Duration::from_millis(100);
        acts = job.tick(at, &[at, now + Duration::from_millis(500), now]);
    }
    assert!(acts[0] == Act::Cut(1) && ends(&acts[1..]), "{acts:?}");
    assert!(job.verdict().words.unwrap().starts_with("b: its agent fell silent"));
    // No answer.
    let mut job = reached(Some(1), now);
    job.hear(0, News::Ready { pid: 1, notes: vec![] }, now);
    let (mut at, mut acts) = (now, vec![]);
    while acts.is_empty() {
        at += Duration::from_secs(1);
        acts = job.tick(at, &[at; 3]);
    }
    job.lost(0, "", false, at);
    assert!(job.is_over());
    let words = job.verdict().words.unwrap();
    assert!(words.contains("b: no answer from its agent") && !words.contains("c: "), "{words}");
    // One of them cannot be started: so says the one above it.
    let mut job = reached(Some(1), now);
    job.hear(0, News::Ready { pid: 1, notes: vec![] }, now);
    job.hear(1, News::Ready { pid: 1, notes: vec![] }, now);
    assert!(ends(&job.hear(
        2,
        News::Lost { words: "Permission denied (publickey).".into(), well: false },
        now
    )));
    let words = job.verdict().words.unwrap();
    assert_eq!(words, "c: no agent could be started\n    Permission denied (publickey).");
}

/// Who had RDMA devices in his hands most likely lost a cable, or leaves them unusable.
#[test]
fn the_end_of_a_rank_with_devices() {
    for (signal, held, words) in [
        (libc::SIGSEGV, true, "whose cable is pulled out"),
        (libc::SIGSEGV, false, "a fault of the program"),
        (libc::SIGKILL, true, "unusable until a restart"),
        (libc::SIGKILL, false, "for lack of memory"),
    ] {
        let now = Instant::now();
        let mut job = running(now);
        job.hear(2, News::Ended { rank: 3, how: How::Signal(signal), asked: false, held }, now);
        let said = job.verdict().words.unwrap();
        assert!(
            said.contains(words) && said.starts_with("rank 3 (c, pid 103) was killed by signal"),
            "{said}"
        );
    }
}
