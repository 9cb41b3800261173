//! Whether the task can be done on this host, and the start of its ranks.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;

use fulmen::fabric::tcp;
use fulmen::job::env::{ADDRESSES, CONTROL, LOCAL_RANK, LOCAL_SIZE, RANK, SIZE, addresses};
use fulmen::job::messages::{Ending, Fingerprint, News, Program, Stream, ToRank, Up};

use super::super::branch::path_of;
use super::super::children;
use super::streams::{feed, hear_rank, tell_rank};
use super::{Agent, Child, Event, Input, spawn};

impl Agent {
    /// Whether the task can be done here.
    pub(super) fn check(&self) -> Result<Vec<String>, Ending> {
        let refuse = |code, reason: String| Err(Ending::new(code, reason));
        let mut notes = vec![];
        let Program { path, fingerprint, .. } = &self.start.program;
        let path = path_of(path);
        let shown = path.display();
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(e) => {
                let remedy = "put the program there, or let it be copied with --copy";
                return refuse(2, format!("{shown}: {e}\n    {remedy}"));
            }
        };
        match file.metadata() {
            Ok(about) if about.is_file() && about.permissions().mode() & 0o111 != 0 => {}
            Ok(_) => return refuse(2, format!("{shown} is no program that may be executed")),
            Err(e) => return refuse(2, format!("{shown}: {e}")),
        }
        if let Some(wanted) = fingerprint {
            match Fingerprint::of(&mut file) {
                Ok(print) if print == *wanted => {}
                Ok(print) => {
                    let what =
                        format!("{shown} is of another build here: {print}, the launcher's is {wanted}");
                    return refuse(
                        2,
                        format!("{what}\n    put the same there, use --copy, or allow it with --any-build"),
                    );
                }
                Err(e) => return refuse(2, format!("{shown}: {e}")),
            }
        }
        let folder = path_of(&self.start.folder);
        if !folder.is_dir() {
            if !self.start.any_folder {
                return refuse(2, format!("--wdir: {}: there is no such folder", folder.display()));
            }
            notes
                .push(format!("there is no folder {}; the ranks start in the home folder", folder.display()));
        }
        let vars = self.start.place.vars.iter();
        let told = vars.filter(|(name, _)| name == ADDRESSES.as_bytes()).map(|(_, text)| text);
        for text in told {
            // No more is lost by what cannot be read or is not here than a preference.
            let named = addresses(ADDRESSES, &String::from_utf8_lossy(text)).unwrap_or_default();
            for address in tcp::not_here(&named).unwrap_or_default() {
                notes.push(format!(
                    "the hostfile gives it the address {address}, which it does not have: not used"
                ));
            }
        }
        Ok(notes)
    }

    pub(super) fn start_all(&mut self) -> Result<(), Ending> {
        for i in 0..self.start.place.ranks.len() {
            let rank = self.start.place.ranks[i].rank;
            let pid = self.start_one(i).map_err(|(code, e)| {
                let program = path_of(&self.start.program.path);
                Ending::new(code, format!("rank {rank} could not be started ({}): {e}", program.display()))
            })?;
            self.tell(News::Started { rank, pid });
        }
        Ok(())
    }

    fn start_one(&mut self, i: usize) -> Result<u32, (u8, String)> {
        let start = &self.start;
        let rank = &start.place.ranks[i];
        let system = |e: io::Error| (3, e.to_string());
        let (ours, theirs) = UnixStream::pair().map_err(system)?;
        let folder = path_of(&start.folder);
        let home = || std::env::home_dir().filter(|h| h.is_dir()).unwrap_or_else(|| PathBuf::from("/"));
        let mut command = Command::new(path_of(&start.program.path));
        command
            .args(start.program.args.iter().map(|a| std::ffi::OsString::from_vec(a.clone())))
            .current_dir(if folder.is_dir() { folder } else { home() })
            .envs(start.vars.iter().chain(&start.place.vars).map(|(k, v)| {
                (std::ffi::OsString::from_vec(k.clone()), std::ffi::OsString::from_vec(v.clone()))
            }))
            .env(CONTROL, theirs.as_raw_fd().to_string())
            .env(RANK, rank.rank.to_string())
            .env(SIZE, start.welcome.hosts.len().to_string())
            .env(LOCAL_RANK, rank.local.to_string())
            .env(LOCAL_SIZE, start.place.ranks.len().to_string())
            .stdin(if rank.rank == 0 { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut process = children::start(command, &theirs).map_err(|e| {
            (
                if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENOEXEC) {
                    2
                } else {
                    3
                },
                e.to_string(),
            )
        })?;
        drop(theirs);
        let pid = process.pid();
        if let Some(guard) = &mut self.guard {
            guard.watch(pid);
        }
        let child = process.child();
        let (input, streams) = (child.stdin.take(), (child.stdout.take(), child.stderr.take()));
        let (words, to_write) = mpsc::channel();
        let number = rank.rank;
        self.ranks.push(Child {
            rank: number,
            process,
            words,
            joined: false,
            silent: false,
            untold: None,
            keep: None,
            stopped: None,
            signalled: false,
            told: false,
        });
        // From here on a failure leaves no process behind: it is among `ranks`.
        let thread = |e: String| (3, e);
        if let (Some(out), Some(err)) = streams {
            self.forward(number, Stream::Out, out).map_err(thread)?;
            self.forward(number, Stream::Err, err).map_err(thread)?;
        }
        if let Some(input) = input {
            let (to, chunks) = mpsc::channel();
            self.input = Input::Open(to);
            let (out, host) = (self.out.clone(), self.start.place.host);
            spawn("input", move || feed(input, &chunks, &out, host)).map_err(thread)?;
        }
        let index = self.ranks.len() - 1;
        let reader = ours.try_clone().map_err(system)?;
        let events = self.events.clone();
        spawn("from rank", move || hear_rank(index, reader, &events)).map_err(thread)?;
        let welcome = ToRank::Welcome(self.start.welcome.clone());
        spawn("to rank", move || tell_rank(ours, &welcome, &to_write)).map_err(thread)?;
        Ok(pid)
    }

    /// Passes on what a rank writes.
    fn forward(
        &mut self,
        rank: u32,
        stream: Stream,
        mut from: impl Read + Send + 'static,
    ) -> Result<(), String> {
        let (out, events, host) = (self.out.clone(), self.events.clone(), self.start.place.host);
        spawn("output", move || {
            let mut chunk = vec![0; 1 << 15];
            // After the launcher's end it is read all the same: nobody's write must fail for that.
            loop {
                match from.read(&mut chunk) {
                    Ok(0) => break,
                    Ok(n) => {
                        let news = News::Output { rank, stream, bytes: chunk[..n].to_vec() };
                        out.send(&Up { host, news });
                    }
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            let _ = events.send(Event::Drained);
        })?;
        self.open += 1;
        Ok(())
    }
}
