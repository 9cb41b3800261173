//! The commands that start an agent on a host, and what ssh's words mean.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// How hosts are reached.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reach {
    /// Program and arguments; host and command follow.
    words: Vec<String>,
}

impl Reach {
    /// The user's `ssh`, or the command that the user says. ssh is told never to prompt.
    pub fn new(command: Option<&str>, patience: Duration) -> Reach {
        let mut words: Vec<String> =
            command.unwrap_or("ssh").split_whitespace().map(str::to_string).collect();
        if words.is_empty() {
            words.push("ssh".into());
        }
        if Path::new(&words[0]).file_name().is_some_and(|name| name == "ssh") {
            // Before our own deadline, so that ssh has the word.
            let connect = patience.as_secs().saturating_sub(1).max(1);
            words.extend(
                ["-o", "BatchMode=yes", "-o", &format!("ConnectTimeout={connect}"), "-T"].map(str::to_string),
            );
        }
        Reach { words }
    }

    /// These words, for another host to do the same: of a program's path, from whatever folder.
    pub fn words(&self) -> Vec<String> {
        let mut words = self.words.clone();
        if words[0].contains('/')
            && let Ok(path) = std::path::absolute(&words[0])
        {
            words[0] = path.display().to_string();
        }
        words
    }

    /// From such words; `None` when there are none.
    pub fn from_words(words: &[String]) -> Option<Reach> {
        (!words.is_empty()).then(|| Reach { words: words.to_vec() })
    }

    /// Runs `remote`, a line for a shell, on a host.
    pub fn command(&self, host: &str, remote: &str) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).arg(host).arg(remote);
        command
    }
}

/// For any shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Starts an agent that is there.
pub fn agent(path: &str) -> String {
    format!("exec {} {}", quoted(path), super::agent::ARGUMENT)
}

/// Takes `len` bytes of an agent from its input, and starts that, in a folder that only the user can enter.
pub fn copied_agent(len: u64) -> String {
    let script = format!(
        "umask 077; d=`mktemp -d \"${{TMPDIR:-/tmp}}/fulmen-run.XXXXXX\"` || exit 1; \
         trap \"rm -rf \\\"$d\\\"\" 0 1 2 15; head -c {len} >\"$d/fulmen-run\" && \
         test `wc -c <\"$d/fulmen-run\"` -eq {len} && chmod 700 \"$d/fulmen-run\" && trap - 0 1 2 15 && \
         exec \"$d/fulmen-run\" {} \"$d\"",
        super::agent::ARGUMENT
    );
    format!("sh -c {}", quoted(&script))
}

/// Ends an agent that does not answer, if that process still is one.
pub fn kill(pid: u32) -> String {
    let script = format!(
        "case \"`ps -o args= -p {pid}`\" in *fulmen-run*{}*) kill -9 {pid};; esac",
        super::agent::ARGUMENT
    );
    format!("sh -c {}", quoted(&script))
}

/// What the user should hear of ssh's words and its end: the last lines, and a remedy for what is well known.
pub fn explain(said: &[String], status: &str, host: &str) -> String {
    let mut lines: Vec<&str> = said
        .iter()
        .map(|l| l.trim())
        .filter(|l| !l.is_empty() && l.chars().any(char::is_alphanumeric))
        .collect();
    let changed = lines.iter().position(|l| l.contains("IDENTIFICATION HAS CHANGED"));
    let has = |word: &str| said.iter().any(|l| l.contains(word));
    let remedy = if changed.is_some() {
        format!("its key is not the one that ssh knows: if the host was set up anew, `ssh-keygen -R {host}`")
    } else if has("Permission denied") {
        format!("ssh must get in without a password: see that `ssh -o BatchMode=yes {host} true` works")
    } else if has("Host key verification failed") {
        format!("ssh does not know the host's key yet: log in once by hand, `ssh {host}`")
    } else if has("Could not resolve") {
        "check the name, or give it an entry in ~/.ssh/config".to_string()
    } else if status.contains("127") || has("not found") || has("No such file") {
        "fulmen-run must be there, at the same path: put it there, name it with --agent-path, or use --copy"
            .to_string()
    } else {
        format!("see that `ssh -o BatchMode=yes {host} true` works")
    };
    // The tail says why; of the warning about a changed key the head says it.
    let last = lines.split_off(lines.len().saturating_sub(3));
    let mut text: Vec<String> = changed
        .and_then(|at| lines.get(at))
        .map(|l| l.trim_matches(['@', ' ']).to_string())
        .into_iter()
        .collect();
    text.extend(last.into_iter().map(|l| l.trim_matches('@').trim().to_string()));
    text.push(format!("{status}; {remedy}"));
    text.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(command: &Command) -> Vec<String> {
        std::iter::once(command.get_program())
            .chain(command.get_args())
            .map(|w| w.to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn ssh_never_prompts_and_gives_up_before_we_do() {
        let reach = Reach::new(None, Duration::from_secs(9));
        let said = words(&reach.command("b", "true"));
        assert_eq!(said, ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-T", "b", "true"]);
        let reach = Reach::new(Some("/usr/bin/ssh -p 2222"), Duration::from_millis(100));
        assert_eq!(words(&reach.command("b", "x"))[..4], ["/usr/bin/ssh", "-p", "2222", "-o"]);
        assert_eq!(
            words(&Reach::new(Some("./stub a"), Duration::ZERO).command("b", "x")),
            ["./stub", "a", "b", "x"]
        );
    }

    /// The lines that a shell gets.
    #[test]
    fn lines_for_a_shell() {
        assert_eq!(agent("/a b/it's"), r"exec '/a b/it'\''s' --agent");
        let home = tempfile::tempdir().unwrap();
        let mut child = Command::new("sh")
            .args(["-c", &copied_agent(30)])
            .env("TMPDIR", home.path())
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        use std::io::Write;
        let script = b"#!/bin/sh\necho $1; rm -r $2 \n\n\n\n";
        child.stdin.take().unwrap().write_all(&script[..30]).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "--agent\n");
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
        // A launcher that goes away half-way leaves nothing behind.
        let status = Command::new("sh")
            .args(["-c", &copied_agent(30)])
            .env("TMPDIR", home.path())
            .stdin(std::process::Stdio::null())
            .status()
            .unwrap();
        assert!(!status.success());
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
        // No process of that number is an agent.
        assert!(Command::new("sh").args(["-c", &kill(1)]).status().unwrap().success());
    }

    #[test]
    fn ssh_s_own_words_are_shown_with_a_remedy() {
        let explained = |said: &str, status: &str| {
            explain(&said.lines().map(str::to_string).collect::<Vec<_>>(), status, "b")
        };
        let changed = "@@@@@@@@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n@@@@@@@@@@@\n\
                       IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!\nIt is also possible.\n\
                       The fingerprint for the ED25519 key sent by the remote host is\nSHA256:x.\n\
                       Offending ED25519 key in /home/me/.ssh/known_hosts:1\nHost key verification failed.";
        let text = explained(changed, "exit status 255");
        assert!(
            text.contains("REMOTE HOST IDENTIFICATION HAS CHANGED!")
                && text.contains("Host key verification failed.")
        );
        assert!(text.contains("ssh-keygen -R b"), "{text}");
        let text = explained("root@b: Permission denied (publickey,password).\r", "exit status 255");
        assert!(
            text.starts_with(
                "root@b: Permission denied (publickey,password).\nexit status 255; ssh must get in"
            ),
            "{text}"
        );
        let text =
            explained("ssh: Could not resolve hostname b: Name or service not known", "exit status 255");
        assert!(text.contains("~/.ssh/config"), "{text}");
        let text = explained("sh: 1: /opt/fulmen-run: not found", "exit status 127");
        assert!(text.contains("--agent-path"), "{text}");
        assert!(explained("", "signal 9").starts_with("signal 9; see that `ssh"));
    }
}
