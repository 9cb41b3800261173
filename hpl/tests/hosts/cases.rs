//! Four hosts on a switch: grids, the field's cases K7, and how long a launch takes.

use crate::lab::{HPL, Lab, alone};

const RUN: [&str; 8] = ["-N", "300", "--nb", "24", "--threads", "1", "--output", "/dev/null"];

#[test]
fn grids_over_ssh_have_the_bits_of_one_process() {
    // Tunnels and containers' networks come first in every list of interfaces (K7-05), two with the same address everywhere.
    let Some(lab) = Lab::up(4, "switch+decoys") else { return };
    let first = lab.says(1, &["ip", "-brief", "address"]);
    assert!(first.find("docker0").unwrap() < first.find("en0").unwrap(), "{first}");
    let wanted = alone(&RUN[..4]);
    for (p, q) in [("1", "4"), ("2", "2"), ("4", "1")] {
        let args = [&["--host", "h1,h2,h3,h4", HPL], &RUN[..], &["--hash", "-P", p, "-Q", q]].concat();
        let ended = lab.run(&args);
        ended.expect(0, &["PASSED", "4 ranks"]);
        assert_eq!(ended.hash(), wanted, "{p} x {q}: {ended:?}");
    }
    // Two ranks a host.
    let args = [&["--host", "h1:2,h2:2", HPL], &RUN[..], &["--hash", "-P", "2", "-Q", "2"]].concat();
    assert_eq!(lab.run(&args).hash(), wanted);
    assert_eq!(lab.left_over(std::time::Duration::from_secs(10)), Vec::<String>::new());

    k7_01_and_04(&lab);
    k7_02(&lab);
    copies(&lab);
    launch(&lab);
}

/// Hosts that cannot take part: ssh's own words, soon, and nothing is started.
fn k7_01_and_04(lab: &Lab) {
    let config = lab.folder().join("config");
    let key = lab.folder().join("stranger");
    let stranger = key.display().to_string();
    lab.says(1, &["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", &stranger]);
    let known = lab.folder().join("known_hosts");
    let public = std::fs::read_to_string(key.with_extension("pub")).unwrap();
    let public: Vec<&str> = public.split_whitespace().take(2).collect();
    std::fs::write(&known, format!("changed {}\n", public.join(" "))).unwrap();
    let known = known.display();
    std::fs::write(
        &config,
        format!(
            "Host refuses\n HostName 192.168.77.2\n Port 1\n\
             Host nobody\n HostName 192.168.77.99\n\
             Host changed\n HostName 192.168.77.2\n HostKeyAlias changed\n UserKnownHostsFile {known}\n\
             Host unknown\n HostName 192.168.77.2\n HostKeyAlias unknown\n\
             Host jumps\n HostName 192.168.77.3\n ProxyJump refuses\n\
             Include /etc/ssh/ssh_config\n"
        ),
    )
    .unwrap();
    let ssh = format!("ssh -F {}", config.display());
    let run = |hosts: &str| lab.run(&["--ssh", &ssh, "--host", hosts, "sh", "-c", "echo started"]);
    for (host, words) in [
        ("no-such-host", &["Could not resolve hostname no-such-host", "~/.ssh/config"][..]),
        ("refuses", &["connect to host 192.168.77.2 port 1: Connection refused"]),
        ("nobody", &["connect to host 192.168.77.99 port 22: "]),
        ("changed", &["REMOTE HOST IDENTIFICATION HAS CHANGED!", "ssh-keygen -R changed"]),
        ("unknown", &["Host key verification failed.", "ssh unknown"]),
        ("jumps", &["Connection refused"]),
    ] {
        let ended = run(&format!("h1,{host},h3"));
        let named = format!("{host}: no agent could be started");
        ended.expect(4, &[&[named.as_str()], words].concat());
        assert!(!ended.out.contains("started"), "a rank was started: {ended:?}");
        println!("{host}: reported after {:.1} s", ended.took.as_secs_f64());
    }
    // The host does not let us in: no prompt, no retries.
    let only = lab.folder().join("only");
    let own = std::fs::read_to_string(lab.etc(1).join("ssh/ssh_config")).unwrap();
    let own = own.lines().filter(|l| !l.contains("IdentityFile")).collect::<Vec<_>>().join("\n");
    std::fs::write(&only, format!("{own}\n IdentityFile {stranger}\n")).unwrap();
    let ssh_only = format!("ssh -F {}", only.display());
    let ended = lab.run(&["--ssh", &ssh_only, "--host", "h1,h2", "sh", "-c", "echo started"]);
    ended.expect(4, &["h2: no agent could be started", "Permission denied (publickey)", "BatchMode"]);
    assert!(!ended.out.contains("started"), "{ended:?}");
    // All that cannot take part are named, not only the first.
    let ended = run("no-such-host,refuses,h1");
    ended.expect(4, &["no-such-host: no agent", "refuses: no agent"]);
    // Black holes: a host that does not answer, and a name server. Of the first ssh speaks, of the second we must.
    lab.cut(3, "en0", "in");
    // ssh has a second less than we wait for it: on a busy machine its words may come too late.
    let in_time = (0..5).any(|_| {
        let ended = lab.run(&["--start-timeout", "3", "--host", "h2,h3", "true"]);
        ended.expect(4, &["h3: no a"]); // `no agent`, or `no answer`
        println!("h3 cut off: reported after {:.1} s (--start-timeout 3)", ended.took.as_secs_f64());
        ["h3: no agent could be started", "Connection timed out"]
            .iter()
            .all(|words| ended.err.contains(words))
    });
    assert!(in_time, "never in ssh's own words");
    std::fs::write(lab.etc(1).join("resolv.conf"), "nameserver 192.168.77.3\n").unwrap();
    let ended = lab.run(&["--start-timeout", "3", "--host", "h1,no-such-host", "true"]);
    ended.expect(4, &["no-such-host: no answer from its agent within 3.0 s"]);
    println!("no name server: reported after {:.1} s (--start-timeout 3)", ended.took.as_secs_f64());
    std::fs::write(lab.etc(1).join("resolv.conf"), "").unwrap();
    lab.heal(3, "en0");
    assert_eq!(lab.left_over(std::time::Duration::from_secs(10)), Vec::<String>::new());
}

/// Hostfiles that crash others.
fn k7_02(lab: &Lab) {
    for (text, ranks) in [
        ("h2", 1),
        ("h2\nh2\n", 2),
        ("h1\r\nh2\r\n", 2),
        ("h2:2", 2),
        ("h[1-4] slots=2 max_slots=4 # c", 8),
        (r#"[{"ssh": "h3", "ips": ["192.168.77.3"]}, {"ssh": "h4", "ips": ["192.168.77.4"]}]"#, 2),
    ] {
        std::fs::write(lab.folder().join("hosts"), text).unwrap();
        let ended = lab.run(&["--hostfile", "hosts", "hostname"]);
        ended.expect(0, &[]);
        let mut seen: Vec<&str> = ended.out.lines().collect();
        assert_eq!(seen.len(), ranks, "{text}: {ended:?}");
        seen.dedup();
        assert!(seen.iter().all(|h| text.contains(h) || text.contains("h[")), "{text}: {ended:?}");
    }
}

/// Folders that a copy cannot be made in, or not started from: the remedy is theirs and not ssh's, and nothing is left in them.
fn copies(lab: &Lab) {
    let tmp = lab.etc(2).join("tmp").display().to_string();
    for (options, words) in [
        ("noexec", "(noexec): set TMPDIR there"),
        ("ro", "nothing can be written to the folder for temporary files there: set TMPDIR"),
        ("size=64k", "the folder for temporary files is full there: make room"),
    ] {
        lab.says(2, &["mount", "-t", "tmpfs", "-o", options, "none", &tmp]);
        let ended = lab.run(&["--copy", "--host", "h2", "hostname"]);
        ended.expect(4, &["h2: no agent could be started", words]);
        for wrong in ["BatchMode", "--agent-path"] {
            assert!(!ended.err.contains(wrong), "{options}: {ended:?}");
        }
        assert_eq!(lab.says(2, &["ls", "-A", &tmp]), "", "{options}");
        lab.says(2, &["umount", &tmp]);
    }
    let ended = lab.run(&["--copy", "--host", "h2", "hostname"]);
    assert_eq!((ended.code, ended.out.trim()), (Some(0), "h2"), "{ended:?}");
}

/// Measured and printed, not asserted: the machine may be busy.
fn launch(lab: &Lab) {
    let hosts = ["-n", "32", "--host", "h1:8,h2:8,h3:8,h4:8"];
    // Of hpl-run the help: rank 0 gives it when all ranks are connected.
    for (what, program, line) in [
        ("a shell", &["sh", "-c", "echo works"][..], "works"),
        ("hpl-run", &[HPL, "--help"], "Usage: hpl-run"),
    ] {
        let mut job = lab.start(&[&hosts, program].concat());
        assert!(job.until(line), "{}", job.so_far());
        let first = job.began.elapsed().as_secs_f64();
        let ended = job.end();
        ended.expect(0, &[]);
        let over = ended.took.as_secs_f64();
        println!("32 ranks of {what} on 4 hosts: first line after {first:.2} s, over after {over:.2} s");
    }
}
