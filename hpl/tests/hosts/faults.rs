//! Random faults at random moments of a run on four hosts: everything ends by itself, in time, says why, and leaves nothing.
//!
//! FULMEN_FAULTS tells how many (8), FULMEN_FAULTS_FROM the first seed (0), FULMEN_FAULTS_SILENCE the bound in seconds (6).

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::lab::{HPL, Job, Lab, Process};

/// What happens.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum What {
    KillRank,
    StopRank,
    KillAgent,
    StopAgent,
    KillSsh,
    CableOut,
    NothingComesIn,
    NothingGoesOut,
    DiskFull,
}

/// When, as a run without a fault has gone.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum When {
    Launch,
    Generation,
    Factorization,
    Solve,
    Report,
}

const WHAT: [What; 9] = [
    What::KillRank,
    What::StopRank,
    What::KillAgent,
    What::StopAgent,
    What::KillSsh,
    What::CableOut,
    What::NothingComesIn,
    What::NothingGoesOut,
    What::DiskFull,
];
const WHEN: [When; 5] = [When::Launch, When::Generation, When::Factorization, When::Solve, When::Report];

/// Numbers that look random and come again with the seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn part(&mut self) -> f64 {
        self.below(1 << 20) as f64 / (1 << 20) as f64
    }
}

/// How long a run takes when nothing happens.
struct Pace {
    /// Until the head of the report: all is ready to work.
    head: Duration,
    /// Until the answer is checked.
    passed: Duration,
}

struct Fault {
    what: What,
    when: When,
    /// The host, from 1; also the number of its rank, from 0, plus one.
    host: usize,
    /// How far into that part of the run.
    part: f64,
    /// So many hosts are reached directly: all, or one, and through it the others one after the other.
    fan_out: usize,
}

impl Fault {
    fn draw(seed: u64) -> Fault {
        let mut random = Random(seed.wrapping_mul(0x1234_5678_9ABC_DEF1));
        random.next();
        // Every kind and every part of the run comes in turn; what goes with what is drawn.
        let what = WHAT[(seed as usize) % WHAT.len()];
        let when = WHEN[random.below(WHEN.len() as u64) as usize];
        let (host, part) = (1 + random.below(4) as usize, random.part());
        Fault { what, when, host, part, fan_out: if random.below(3) == 0 { 1 } else { 64 } }
    }

    /// Lets the job come to its part.
    fn wait(&self, job: &mut Job, pace: &Pace) {
        // The first and the last run are alike, and take the time.
        let run = (pace.passed - pace.head).mul_f64(0.5);
        let (words, times, later) = match self.when {
            When::Launch => ("", 0, pace.head.mul_f64(self.part)),
            When::Generation => (HEAD, 1, run.mul_f64(0.1 * self.part)),
            When::Factorization => (HEAD, 1, run.mul_f64(0.1 + 0.8 * self.part)),
            When::Solve => {
                // As the first has gone just now: the machine may have other things to do than when the pace was taken.
                job.until(HEAD);
                let began = Instant::now();
                job.until(PASSED);
                (PASSED, RUNS - 1, began.elapsed().mul_f64(0.7 + 0.25 * self.part))
            }
            When::Report => (PASSED, RUNS, Duration::ZERO),
        };
        job.until_times(words, times);
        std::thread::sleep(later);
    }
}

fn number(name: &str, otherwise: f64) -> f64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().expect(name))
}

/// Orders of the runs of one job, so that it takes a second or two, and its report more than a page of a disk.
const N: &str = "2000,100,100,2000";
const RUNS: usize = 4;
/// What a run says when it begins, and when its answer is checked.
const HEAD: &str = "   grid 2x2";
const PASSED: &str = "PASSED   residual";

struct Bench {
    lab: Lab,
    silence: f64,
}

impl Bench {
    /// The folder of the reports: a disk of its own, with little room, on the first host.
    fn disk(&self) -> PathBuf {
        self.lab.folder().join("disk")
    }

    fn args(&self, fan_out: usize) -> Vec<String> {
        let disk = self.disk().display().to_string();
        let words = format!(
            "--silence {} --start-timeout 15 --fan-out {fan_out} --host h1,h2,h3,h4 {HPL} -N {N} --nb 32 -P 2 -Q 2 --threads 1 --hash \
             --output {disk}/HPL.out --json {disk}/report.json",
            self.silence
        );
        words.split_whitespace().map(String::from).collect()
    }

    fn new_disk(&self) {
        let disk = self.disk().display().to_string();
        std::fs::create_dir_all(&disk).unwrap();
        self.lab.says(1, &["mount", "-t", "tmpfs", "-o", "size=64k", "none", &disk]);
        self.lab.says(1, &["sh", "-c", &format!("echo old >{disk}/HPL.out; echo old >{disk}/report.json")]);
    }

    fn drop_disk(&self) {
        self.lab.says(1, &["umount", &self.disk().display().to_string()]);
    }

    fn on_disk(&self) -> Vec<String> {
        let list = self.lab.says(1, &["ls", "-A", &self.disk().display().to_string()]);
        list.lines().map(String::from).filter(|name| name != "fill").collect()
    }

    fn pace(&self) -> Pace {
        self.new_disk();
        let args = self.args(64);
        let mut job = self.lab.start(&args.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(job.until(HEAD), "{}", job.so_far());
        let head = job.began.elapsed();
        assert!(job.until_times(PASSED, RUNS), "{}", job.so_far());
        let passed = job.began.elapsed();
        let ended = job.end();
        ended.expect(0, &["PASSED"]);
        assert_eq!(self.on_disk(), ["HPL.out", "report.json"]);
        self.drop_disk();
        Pace { head, passed }
    }

    fn victim(&self, fault: &Fault) -> Option<Process> {
        let here = self.lab.processes(fault.host);
        match fault.what {
            What::KillRank | What::StopRank => {
                here.into_iter().find(|p| p.is("hpl-run", HPL) && p.rank.is_some())
            }
            What::KillAgent | What::StopAgent => here.into_iter().find(|p| p.is("fulmen-run", "--agent")),
            What::KillSsh => {
                let name = format!("h{}", fault.host);
                let all = self.lab.hosts().flat_map(|i| self.lab.processes(i));
                all.into_iter().find(|p| p.is("ssh", &name))
            }
            _ => None,
        }
    }

    /// One fault in one run: what is wrong about how it ended, and how long that took; `None` when it came too late.
    fn suffer(&self, fault: &Fault, pace: &Pace) -> Result<Option<Duration>, String> {
        self.new_disk();
        let args = self.args(fault.fan_out);
        let mut job = self.lab.start(&args.iter().map(String::as_str).collect::<Vec<_>>());
        fault.wait(&mut job, pace);
        let mut done = false;
        match fault.what {
            What::CableOut => self.lab.cut(fault.host, "en0", "down"),
            What::NothingComesIn => self.lab.cut(fault.host, "en0", "in"),
            What::NothingGoesOut => self.lab.cut(fault.host, "en0", "out"),
            What::DiskFull => {
                let fill = format!("cat /dev/zero >{}/fill 2>/dev/null; true", self.disk().display());
                self.lab.says(1, &["sh", "-c", &fill]);
            }
            _ => {
                // At launch there may be nobody yet.
                while !done && !job.is_over() {
                    if let Some(victim) = self.victim(fault) {
                        let stop = matches!(fault.what, What::StopRank | What::StopAgent);
                        victim.signal(if stop { libc::SIGSTOP } else { libc::SIGKILL });
                        done = true;
                    }
                }
            }
        }
        let since = Instant::now();
        let ended = job.end();
        let took = since.elapsed();
        // Also what is cut off ends by itself.
        let left = self.lab.left_over(Duration::from_secs_f64(2.0 * self.silence + 10.0));
        let all = since.elapsed();
        if matches!(fault.what, What::CableOut | What::NothingComesIn | What::NothingGoesOut) {
            self.lab.heal(fault.host, "en0");
        }
        let files = self.on_disk();
        let report = self.lab.says(1, &["cat", &self.disk().join("HPL.out").display().to_string()]);
        self.drop_disk();
        let problem = |what: String| {
            Err(format!("{what}\n  ended after {took:.1?}, all gone after {all:.1?}: {ended:?}"))
        };
        if !left.is_empty() {
            // The next fault is not to suffer from this one.
            self.lab.hosts().flat_map(|i| self.lab.processes(i)).for_each(|p| p.signal(libc::SIGKILL));
            return problem(format!("left: {left:?}"));
        }
        if let Some(odd) = files.iter().find(|f| {
            !["HPL.out", "report.json", "HPL.out.partial", "report.json.partial"].contains(&f.as_str())
        }) {
            return problem(format!("left: the file {odd}"));
        }
        if ended.code == Some(0) {
            return if report.contains("PASSED") {
                Ok(None)
            } else {
                problem("passed without a report".into())
            };
        }
        // It may have been complete when the fault came.
        if report != "old" && !report.contains("End of Tests.") {
            return problem(format!("the report that was there is gone: {report}"));
        }
        let (host, rank) = (format!("h{}", fault.host), format!("rank {}", fault.host - 1));
        let (code, names): (i32, Vec<&str>) = match fault.what {
            What::KillRank => (4, vec![&rank, &host, "was killed by signal 9 (SIGKILL)"]),
            What::StopRank => (4, vec![&rank, &host, "was stopped for"]),
            // Who sees all others fall silent names one of them.
            What::CableOut | What::NothingComesIn | What::NothingGoesOut if fault.host == 1 => (4, vec!["h"]),
            What::DiskFull => (3, vec!["cannot be written", "No space left on device"]),
            _ => (4, vec![&host]),
        };
        if ended.code != Some(code) {
            return problem(format!("not exit code {code}"));
        }
        match names.iter().find(|name| !ended.err.contains(**name)) {
            Some(name) => problem(format!("no word of `{name}`")),
            None => {
                println!("    {}", ended.err.trim().replace('\n', "\n    "));
                Ok(Some(all))
            }
        }
    }
}

#[test]
fn random_faults_end_in_time_and_leave_nothing() {
    let Some(lab) = Lab::up(4, "switch") else { return };
    let bench = Bench { lab, silence: number("FULMEN_FAULTS_SILENCE", 6.0) };
    let pace = bench.pace();
    println!("without a fault: head after {:.1?}, passed after {:.1?}", pace.head, pace.passed);
    let from = number("FULMEN_FAULTS_FROM", 0.0) as u64;
    let n = number("FULMEN_FAULTS", 8.0) as u64;
    let (mut wrong, mut longest, mut late) = (vec![], Duration::ZERO, 0);
    for seed in from..from + n {
        let fault = Fault::draw(seed);
        let Fault { what, when, host, fan_out, .. } = fault;
        let name = format!("fault {seed}: {what:?} on h{host} in the {when:?}, fan-out {fan_out}");
        match bench.suffer(&fault, &pace) {
            Ok(Some(all)) => {
                println!("{name}: all gone after {all:.1?}");
                longest = longest.max(all);
            }
            Ok(None) => {
                println!("{name}: came too late");
                late += 1;
            }
            Err(problem) => {
                println!("{name}: WRONG: {problem}");
                wrong.push(name);
            }
        }
    }
    println!("{n} faults, {late} of them too late, {} wrong, longest {longest:.1?}", wrong.len());
    assert!(wrong.is_empty(), "{wrong:?}");
}
