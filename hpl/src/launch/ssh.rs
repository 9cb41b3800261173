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
    /// The user's `ssh`, or the command that the user says, as [`words`] takes it apart. ssh is told never to prompt.
    pub fn new(command: Option<&str>, patience: Duration) -> Reach {
        let mut words = command.and_then(|c| words(c).ok()).unwrap_or_else(|| vec!["ssh".into()]);
        if is_ssh(&words) {
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

    /// What a person tries by hand.
    fn trial(&self, host: &str) -> String {
        let limits_itself = |word: &str| word.starts_with("ConnectTimeout=");
        let mut shown: Vec<&str> = vec![];
        for word in self.words.iter().map(String::as_str).filter(|word| *word != "-T") {
            match limits_itself(word) {
                true => drop(shown.pop()),
                false => shown.push(word),
            }
        }
        // A word that came apart at blanks goes together again.
        let quoted: Vec<_> = shown.iter().chain(&[host, "true"]).map(|word| shell(word)).collect();
        format!("`{}`", quoted.join(" "))
    }

    /// What the user should hear of ssh's words and its end: the last lines, and a remedy for what is well known.
    pub fn explain(&self, said: &[String], status: &str, host: &str) -> String {
        let lines: Vec<String> = said
            .iter()
            .map(|line| line.trim().chars().filter(|c| !c.is_control()).collect())
            .filter(|line: &String| line.chars().any(char::is_alphanumeric))
            .collect();
        let mut lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let changed = lines.iter().position(|l| l.contains("IDENTIFICATION HAS CHANGED"));
        let remedy = self.remedy(&lines, status, host);
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

    fn remedy(&self, lines: &[&str], status: &str, host: &str) -> String {
        let has = |word: &str| lines.iter().any(|l| l.contains(word));
        let code = status.strip_prefix("exit status ").and_then(|code| code.parse::<u8>().ok());
        // The folder that an agent is copied to (`copied_agent`).
        let copied = has("fulmen-run.");
        let elsewhere =
            "set TMPDIR there to another folder, or put the same build there and leave --copy away";
        let works = || format!("see that {} works", self.trial(host));
        let of_ssh = is_ssh(&self.words) && code == Some(255);
        if has("IDENTIFICATION HAS CHANGED") {
            format!(
                "its key is not the one that ssh knows: if the host was set up anew, `ssh-keygen -R {host}`"
            )
        } else if has("Host key verification failed") {
            format!("ssh does not know the host's key yet: log in once by hand, `ssh {host}`")
        } else if has("Could not resolve") {
            "check the name, or give it an entry in ~/.ssh/config".into()
        } else if has("No space left") {
            format!("the folder for temporary files is full there: make room, {elsewhere}")
        } else if has("Read-only file system") {
            format!("nothing can be written to the folder for temporary files there: {elsewhere}")
        } else if has("Exec format error") || has("cannot execute") && has("format") {
            "fulmen-run is of another kind of machine: build it there, at the same path or at --agent-path"
                .into()
        } else if code == Some(126) && copied {
            format!(
                "programs in the folder for temporary files may not be executed there (noexec): {elsewhere}"
            )
        } else if code == Some(126) {
            "fulmen-run is there and may not be executed: chmod +x, a file system that is not noexec, or --agent-path".into()
        } else if copied && !of_ssh {
            format!("it could not be copied to the folder for temporary files there: {elsewhere}")
        } else if has("Permission denied") && of_ssh {
            format!("ssh must get in without a password: {}", works())
        } else if code == Some(127) || has("not found") || has("No such file") {
            "fulmen-run must be there, at the same path: put it there, name it with --agent-path, or use --copy".into()
        } else if code == Some(0) {
            format!("it ended without having started fulmen-run there: {}", works())
        } else {
            works()
        }
    }

    /// Runs `remote`, a line for a shell, on a host.
    pub fn command(&self, host: &str, remote: &str) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).arg(host).arg(remote);
        command
    }
}

/// How whoever ends in order ends.
pub const WELL: &str = "exit status 0";

/// A command's words, as a shell would take them apart.
///
/// # Errors
/// When there are none, or a quote is not closed.
pub fn words(command: &str) -> Result<Vec<String>, String> {
    match shlex::split(command) {
        None => Err("has a quote that is not closed".into()),
        Some(words) if words.first().is_none_or(String::is_empty) => {
            Err("names no command: write as in --ssh 'ssh -p 2222', or leave it away".into())
        }
        Some(words) => Ok(words),
    }
}

fn is_ssh(words: &[String]) -> bool {
    words.first().is_some_and(|word| Path::new(word).file_name().is_some_and(|name| name == "ssh"))
}

/// A word for a shell, in quotes where it needs them.
fn shell(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "_@%+=:,./-".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) { word.into() } else { quoted(word) }
}

/// For any shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Starts an agent that is there.
pub fn agent(path: &str) -> String {
    format!("exec {} {}", quoted(path), super::agent::ARGUMENT)
}

/// Takes `len` bytes of an agent from its input, and starts that, in a folder that only the user can enter. (It is tried first:
/// a shell whose `exec` fails tidies nothing.)
pub fn copied_agent(len: u64) -> String {
    let script = format!(
        "umask 077; d=`mktemp -d \"${{TMPDIR:-/tmp}}/fulmen-run.XXXXXX\"` || exit 1; \
         trap \"rm -rf \\\"$d\\\"\" 0 1 2 15; head -c {len} >\"$d/fulmen-run\" && \
         test `wc -c <\"$d/fulmen-run\"` -eq {len} && chmod 700 \"$d/fulmen-run\" && \
         \"$d/fulmen-run\" --version </dev/null >/dev/null && trap - 0 1 2 15 && \
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

    /// As a shell takes them apart.
    #[test]
    fn words_with_quotes() {
        let reach =
            Reach::new(Some("ssh -o \"ProxyCommand=nc -x p %h %p\" -i 'a b'"), Duration::from_secs(9));
        let said = words(&reach.command("h", "true"));
        assert_eq!(said[..5], ["ssh", "-o", "ProxyCommand=nc -x p %h %p", "-i", "a b"]);
        assert_eq!(said[said.len() - 2..], ["h", "true"]);
        for (wrong, why) in [("", "names no command"), ("  ", "names no command"), ("ssh 'x", "not closed")] {
            assert!(super::words(wrong).unwrap_err().contains(why), "{wrong}");
        }
    }

    /// The lines that a shell gets.
    #[test]
    fn lines_for_a_shell() {
        assert_eq!(agent("/a b/it's"), r"exec '/a b/it'\''s' --agent");
        let home = tempfile::tempdir().unwrap();
        // Tried first, then started.
        let script = b"#!/bin/sh\n[ $2 ]&&echo $1&&rm -r $2||:\n";
        let mut child = Command::new("sh")
            .args(["-c", &copied_agent(script.len() as u64)])
            .env("TMPDIR", home.path())
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        use std::io::Write;
        child.stdin.take().unwrap().write_all(script).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "--agent\n");
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
        // A launcher that goes away half-way leaves nothing behind.
        let status = Command::new("sh")
            .args(["-c", &copied_agent(script.len() as u64)])
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
            let said: Vec<String> = said.lines().map(str::to_string).collect();
            Reach::new(None, Duration::from_secs(9)).explain(&said, status, "b")
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
        assert_eq!(explained("", "signal 9"), "signal 9; see that `ssh -o BatchMode=yes b true` works");
        // What ssh has nothing to do with.
        let folder = "there: make room, set TMPDIR";
        for (said, status, remedy) in [
            (
                "mktemp: failed to create directory via template '/t/fulmen-run.XXXXXX': No space left on device",
                1,
                folder,
            ),
            ("head: write error: No space left on device", 1, folder),
            ("mktemp: ... '/t/fulmen-run.XXXXXX': Read-only file system", 1, "nothing can be written"),
            ("mktemp: ... '/t/fulmen-run.XXXXXX': Permission denied", 1, "could not be copied to the folder"),
            ("sh: 1: /t/fulmen-run.a1b2c3/fulmen-run: Permission denied", 126, "(noexec): set TMPDIR"),
            ("sh: 1: exec: /opt/fulmen-run: Permission denied", 126, "chmod +x"),
            ("sh: 1: /t/fulmen-run.a1b2c3/fulmen-run: Exec format error", 126, "another kind of machine"),
            ("", 0, "it ended without having started fulmen-run there"),
        ] {
            let text = explained(said, &format!("exit status {status}"));
            assert!(text.starts_with(said) && text.contains(remedy), "{text}");
            assert!(!text.contains("without a password"), "{text}");
        }
        // Another command than ssh; and a host that plays with the terminal.
        let mine = Reach::new(Some("'/my tools/reach' -p 2"), Duration::from_secs(9));
        let text = mine.explain(&["\u{1b}[31mPermission denied\u{7}".into()], "exit status 255", "b");
        assert_eq!(
            text,
            "[31mPermission denied\nexit status 255; see that `'/my tools/reach' -p 2 b true` works"
        );
    }
}
