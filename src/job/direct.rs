//! How ranks find each other that no launcher of ours has started (`torchrun`, `srun`, `mpirun` of another library).
//!
//! What they need to know is the address of rank 0 and a secret. On one host rank 0 leaves both in a file that
//! only its user can read, in a folder that only its user can enter. Across hosts nobody has such a place: the
//! address comes from `torchrun`'s or Slurm's variables or FULMEN_RENDEZVOUS, and the secret from
//! FULMEN_SECRET_FILE, a file that the user has made. Nothing is derived from what others can see.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::env::{self, Place, RENDEZVOUS, SECRET_FILE, Starter};
use crate::error::{Error, Result};
use crate::fabric::host_name;
use crate::fabric::rendezvous::{AtRankZero, Secret};

/// Between two looks for the file, or tries to reach rank 0.
const PAUSE: Duration = Duration::from_millis(20);

/// Who waits for so long says for whom.
const QUIET: Duration = Duration::from_secs(5);

/// How long to wait, and what ends a wait before.
#[derive(Clone, Copy)]
pub struct Patience {
    /// From now on.
    pub limit: Duration,
    /// Whether this rank has been told to end.
    pub interrupted: fn() -> bool,
}

/// A wait for other ranks, which is not to be a silent one.
struct Wait {
    me: String,
    size: usize,
    place: String,
    began: Instant,
    limit: Duration,
    told: Cell<bool>,
    interrupted: fn() -> bool,
}

impl Wait {
    fn begin(place: &Place, at: &str, patience: Patience) -> Wait {
        let Patience { limit, interrupted } = patience;
        let me = format!("rank {} ({})", place.rank, host_name());
        let (size, at) = (place.size, at.into());
        Wait { me, size, place: at, began: Instant::now(), limit, told: Cell::new(false), interrupted }
    }

    /// What is to be said now, if anything: once.
    fn words(&self, missing: &[usize]) -> Option<String> {
        let waited = self.began.elapsed();
        if missing.is_empty() || waited < QUIET || self.told.replace(true) {
            return None;
        }
        let some: Vec<String> = missing.iter().take(8).map(usize::to_string).collect();
        let more = missing.len().saturating_sub(some.len());
        let who = match missing.len() {
            1 => format!("rank {}", some[0]),
            _ if more > 0 => format!("ranks {} and {more} more", some.join(", ")),
            _ => format!("ranks {}", some.join(", ")),
        };
        Some(format!(
            "fulmen: {} waits for {who} of {} at {}, and gives up in {:.0} s",
            self.me,
            self.size,
            self.place,
            self.limit.saturating_sub(waited).as_secs_f64()
        ))
    }

    fn look(&self, missing: &[usize]) -> Result<()> {
        if (self.interrupted)() {
            return Err(Error::Interrupted);
        }
        if let Some(words) = self.words(missing) {
            let _ = writeln!(std::io::stderr(), "{words}");
        }
        Ok(())
    }
}

/// Meets the other ranks of a job; ends by the limit. After some seconds it says on stderr who is waited for.
///
/// # Errors
/// When the environment does not say enough ([`Error::Argument`]) or someone does not come, or this rank is interrupted.
pub fn meet(place: &Place, secret_file: Option<&str>, patience: Patience) -> Result<(AtRankZero, Secret)> {
    let secret = secret_file.map(|file| read_secret(Path::new(file))).transpose()?;
    match (&place.meeting, secret) {
        (Some((host, port)), Some(secret)) => {
            let met = at_address(place, host, *port, &secret, patience)?;
            Ok((met, secret))
        }
        _ if place.on_one_host() => on_this_host(place, &folder()?, patience),
        (None, _) => Err(Error::argument(
            RENDEZVOUS,
            "not set",
            format!("{} does not tell where rank 0 is", place.starter),
            format!(
                "set it to host:port of rank 0, and {SECRET_FILE} to a file of 32 random bytes; or start the ranks \
                 with fulmen-run, or use a build with the feature `mpi`"
            ),
        )),
        (Some(_), None) => Err(Error::argument(
            SECRET_FILE,
            "not set",
            "ranks on several hosts must be able to tell each other from strangers",
            "once: `head -c 32 /dev/urandom >~/.fulmen-secret; chmod 600 ~/.fulmen-secret`, seen by all hosts; \
             then set it to that file. fulmen-run needs none of this",
        )),
    }
}

fn read_secret(file: &Path) -> Result<Secret> {
    let wrong = |problem: String| {
        let remedy = "name a file of at least 32 random bytes that only you may read (chmod 600)";
        Error::argument(SECRET_FILE, file.display(), problem, remedy)
    };
    let mut open = File::open(file).map_err(|e| wrong(format!("cannot be read: {e}")))?;
    let about = open.metadata().map_err(|e| wrong(e.to_string()))?;
    if about.mode() & 0o077 != 0 {
        return Err(wrong(format!("may be read by others (mode {:o})", about.mode() & 0o777)));
    }
    let mut bytes = vec![];
    Read::by_ref(&mut open)
        .take(1 << 16)
        .read_to_end(&mut bytes)
        .map_err(|e| wrong(format!("cannot be read: {e}")))?;
    if bytes.len() < 32 {
        return Err(wrong(format!("has only {} bytes", bytes.len())));
    }
    Ok(Secret::from_bytes(Sha256::digest(&bytes).into()))
}

fn at_address(
    place: &Place,
    host: &str,
    port: u16,
    secret: &Secret,
    patience: Patience,
) -> Result<AtRankZero> {
    let shown = format!("{host}:{port}");
    let Patience { limit, .. } = patience;
    let until = Instant::now() + limit;
    let wait = Wait::begin(place, &shown, patience);
    let missing = |ranks: &[usize]| wait.look(ranks);
    if place.rank == 0 {
        let mut addresses: Vec<SocketAddr> = resolve(host, port).unwrap_or_default();
        // Some systems give their own name a loopback address, where nobody else can come.
        if !place.on_one_host() {
            addresses.retain(|a| !a.ip().is_loopback());
        }
        addresses.push((IpAddr::V4(Ipv4Addr::UNSPECIFIED), port).into());
        let mut last = None;
        for address in &addresses {
            match TcpListener::bind(address) {
                Ok(listener) => {
                    return AtRankZero::host_watched(listener, place.size, secret, limit, &missing);
                }
                Err(e) => last = Some(e),
            }
        }
        return Err(Error::Unreachable {
            what: format!(
                "rank 0 cannot listen at {shown}: {}",
                last.map_or(String::new(), |e| e.to_string())
            ),
            remedy: format!("another program has the port: set {RENDEZVOUS} to another one, on all ranks"),
        });
    }
    loop {
        // A name may come into being a little later than this rank.
        match resolve(host, port) {
            Ok(all) => {
                let left = until.saturating_duration_since(Instant::now());
                return AtRankZero::join_watched(&all, place.rank, place.size, secret, left, &missing);
            }
            Err(_) if Instant::now() + PAUSE < until => {
                missing(&[0])?;
                std::thread::sleep(PAUSE * 10);
            }
            Err(e) => {
                return Err(Error::Unreachable {
                    what: format!("rank {} does not find rank 0 at {shown}: {e}", place.rank),
                    remedy: format!("see that this host knows that name, or set {RENDEZVOUS}"),
                });
            }
        }
    }
}

fn resolve(host: &str, port: u16) -> std::io::Result<Vec<SocketAddr>> {
    // A scope, as in fe80::1%en5, is for the system to understand.
    let text = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    Ok(text.to_socket_addrs()?.collect())
}

/// A folder that only this user can enter.
fn folder() -> Result<PathBuf> {
    // SAFETY: no arguments, always succeeds.
    let user = unsafe { libc::geteuid() };
    let base = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|p| p.is_dir());
    let folder =
        base.map_or_else(|| std::env::temp_dir().join(format!("fulmen-{user}")), |b| b.join("fulmen"));
    private(&folder, user)?;
    Ok(folder)
}

/// Makes it, or sees that it is this user's alone.
fn private(folder: &Path, user: u32) -> Result<()> {
    let system = |e: std::io::Error| Error::System {
        what: format!("the folder {} for the ranks of this host", folder.display()),
        os: e.to_string(),
    };
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(system(e)),
        _ => {}
    }
    let about = fs::symlink_metadata(folder).map_err(system)?;
    match about.is_dir() && about.uid() == user && about.mode() & 0o077 == 0 {
        true => Ok(()),
        false => Err(Error::argument(
            "the folder for the ranks of this host",
            folder.display(),
            "is not this user's alone",
            "remove it, or `chmod 700` it",
        )),
    }
}

/// A file that is removed when all have read it.
struct Note(PathBuf);

impl Drop for Note {
    fn drop(&mut self) {
        // Somebody may have cleaned up before.
        let _ = fs::remove_file(&self.0);
    }
}

fn on_this_host(place: &Place, folder: &Path, patience: Patience) -> Result<(AtRankZero, Secret)> {
    let name: String = match (place.id.as_str(), place.starter) {
        // Its ranks are children of one process, or of scripts that are.
        ("", starter) => format!("parent-{}", started_by(rank_variable(starter))),
        (id, _) => id.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(100).collect(),
    };
    let file = folder.join(format!("{}-{}", tag(place.starter), name));
    if place.rank == 0 { host(place, &file, patience) } else { join(place, &file, patience) }
}

fn rank_variable(starter: Starter) -> &'static str {
    match starter {
        Starter::FulmenRun { .. } => env::RANK,
        Starter::Torchrun => "RANK",
        Starter::OpenMpi => "OMPI_COMM_WORLD_RANK",
        Starter::Pmi => "PMI_RANK",
        Starter::Slurm => "SLURM_PROCID",
    }
}

/// The process that has started this rank: the nearest above it that is no rank itself, as a script is that a launcher has started
/// in the rank's place. Where the system does not tell, the parent.
fn started_by(variable: &str) -> u32 {
    let parent = std::os::unix::process::parent_id();
    let has_it = |pid: u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|b| *b == 0).any(|word| {
            word.strip_prefix(variable.as_bytes()).is_some_and(|rest| rest.first() == Some(&b'='))
        })
    };
    let above = |pid: u32| -> Option<u32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // A program's name, in parentheses, may hold anything.
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok().filter(|pid| *pid > 1)
    };
    std::iter::successors(Some(parent), |pid| above(*pid)).find(|pid| !has_it(*pid)).unwrap_or(parent)
}

fn tag(starter: Starter) -> &'static str {
    match starter {
        Starter::FulmenRun { .. } => "fulmen",
        Starter::Torchrun => "torchrun",
        Starter::OpenMpi => "ompi",
        Starter::Pmi => "pmi",
        Starter::Slurm => "slurm",
    }
}

fn host(place: &Place, file: &Path, patience: Patience) -> Result<(AtRankZero, Secret)> {
    let system = |e: std::io::Error| Error::System {
        what: format!("rank 0 cannot leave word at {}", file.display()),
        os: e.to_string(),
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(system)?;
    let port = listener.local_addr().map_err(system)?.port();
    let secret = Secret::random()?;
    // Renamed into place: nobody reads half of it, and what a job that was killed has left is gone.
    let part = file.with_extension(format!("{}.part", std::process::id()));
    let _part = Note(part.clone());
    let written = File::options().write(true).create_new(true).mode(0o600).open(&part).and_then(|mut f| {
        f.write_all(&port.to_le_bytes())?;
        f.write_all(secret.expose())
    });
    written.and_then(|()| fs::rename(&part, file)).map_err(system)?;
    let _note = Note(file.to_path_buf());
    let wait = Wait::begin(place, &file.display().to_string(), patience);
    let look = |missing: &[usize]| wait.look(missing);
    let met = AtRankZero::host_watched(listener, place.size, &secret, patience.limit, &look)?;
    Ok((met, secret))
}

fn join(place: &Place, file: &Path, patience: Patience) -> Result<(AtRankZero, Secret)> {
    let Patience { limit, .. } = patience;
    let until = Instant::now() + limit;
    let mut last = format!("rank 0 has left no word at {}", file.display());
    let wait = Wait::begin(place, &file.display().to_string(), patience);
    loop {
        let mut bytes = vec![];
        let read = File::open(file).and_then(|f| f.take(35).read_to_end(&mut bytes));
        if read.is_ok()
            && let Some((port, rest)) = bytes.split_first_chunk::<2>()
            && let Ok(secret) = <[u8; 32]>::try_from(rest)
        {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, u16::from_le_bytes(*port)));
            let secret = Secret::from_bytes(secret);
            let left = until.saturating_duration_since(Instant::now());
            // It may be the word of an earlier job: do not knock at that door for long.
            match AtRankZero::join(
                &[address],
                place.rank,
                place.size,
                &secret,
                left.min(Duration::from_secs(2)),
            ) {
                Ok(met) => return Ok((met, secret)),
                Err(e) => last = e.to_string(),
            }
        }
        if Instant::now() + PAUSE >= until {
            return Err(Error::Unreachable {
                what: format!(
                    "rank {} did not meet rank 0 within {:.0} s: {last}",
                    place.rank,
                    limit.as_secs_f64()
                ),
                remedy: format!("see that rank 0 runs, on this host; or set {RENDEZVOUS} and {SECRET_FILE}"),
            });
        }
        wait.look(&[0])?;
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::rendezvous::Rendezvous;

    fn place(rank: usize, meeting: Option<(&str, u16)>, one_host: bool) -> Place {
        Place {
            starter: Starter::OpenMpi,
            rank,
            size: 3,
            local: Some((if one_host { rank } else { 0 }, if one_host { 3 } else { 1 })),
            id: "job/7@1".into(),
            meeting: meeting.map(|(h, p)| (h.to_string(), p)),
        }
    }

    const LIMIT: Patience = within(30_000);

    const fn within(ms: u64) -> Patience {
        Patience { limit: Duration::from_millis(ms), interrupted: || false }
    }

    fn all_meet(meet: impl Fn(usize) -> Result<(AtRankZero, Secret)> + Sync) {
        std::thread::scope(|s| {
            let ranks: Vec<_> = (0..3)
                .map(|rank| {
                    let meet = &meet;
                    s.spawn(move || {
                        let (mut met, secret) = meet(rank).unwrap();
                        (met.all_gather(&[rank as u8]).unwrap(), *secret.expose())
                    })
                })
                .collect();
            let all: Vec<_> = ranks.into_iter().map(|r| r.join().unwrap()).collect();
            assert!(all.iter().all(|a| *a == all[0]), "one secret for all");
            assert_eq!(all[0].0, [[0], [1], [2]]);
        });
    }

    #[test]
    fn on_one_host_word_is_left_and_taken_away() {
        let folder = tempfile::tempdir().unwrap();
        // What a job of the same name has left that was killed.
        fs::write(folder.path().join("ompi-job-7-1"), [1; 34]).unwrap();
        all_meet(|rank| on_this_host(&place(rank, None, true), folder.path(), LIMIT));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn at_an_address_with_a_secret_of_the_users() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), [9; 40]).unwrap();
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let path = file.path().to_str();
        all_meet(|rank| meet(&place(rank, Some(("localhost", port)), true), path, LIMIT));
    }

    #[test]
    fn what_is_missing_is_named() {
        let wrong = |place: &Place, file: Option<&str>| meet(place, file, LIMIT).err().unwrap();
        let error = wrong(&place(1, None, false), None);
        assert!(
            error.exit_code() == 2 && error.to_string().contains("FULMEN_RENDEZVOUS: not set: Open MPI"),
            "{error}"
        );
        let error = wrong(&place(1, Some(("h", 1)), false), None);
        assert!(error.to_string().contains("FULMEN_SECRET_FILE: not set"), "{error}");
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), [9; 31]).unwrap();
        let error = wrong(&place(1, Some(("h", 1)), false), file.path().to_str());
        assert!(error.to_string().contains("has only 31 bytes"), "{error}");
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o644)).unwrap();
        let error = wrong(&place(1, Some(("h", 1)), false), file.path().to_str());
        assert!(error.to_string().contains("may be read by others (mode 644)"), "{error}");
    }

    #[test]
    fn a_rank_that_waits_for_nobody_says_so_in_time() {
        let folder = tempfile::tempdir().unwrap();
        let error = on_this_host(&place(1, None, true), folder.path(), within(200)).err().unwrap();
        assert!(
            error.exit_code() == 4 && error.to_string().contains("rank 0 has left no word at"),
            "{error}"
        );
    }

    /// Whoever it waits for, and what it has left for them is taken away.
    #[test]
    fn who_is_interrupted_waits_for_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let patience = Patience { interrupted: || true, ..LIMIT };
        for rank in [0, 1] {
            let met = on_this_host(&place(rank, None, true), folder.path(), patience);
            assert!(matches!(met, Err(Error::Interrupted)), "{rank}");
            let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
            let met =
                at_address(&place(rank, None, true), "localhost", port, &Secret::random().unwrap(), patience);
            assert!(matches!(met, Err(Error::Interrupted)), "{rank}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_wait_is_told_once_and_after_a_while() {
        let wait = Wait::begin(&place(0, None, true), "h:7", within(60_000));
        assert_eq!(wait.words(&[1]), None);
        let began = Instant::now().checked_sub(Duration::from_secs(6)).unwrap();
        let late = Wait { began, ..wait };
        let words = late.words(&[1, 2]).unwrap();
        assert!(words.ends_with(" waits for ranks 1, 2 of 3 at h:7, and gives up in 54 s"), "{words}");
        assert_eq!(late.words(&[1, 2]), None);
        let many = Wait { told: Cell::new(false), ..late };
        let words = many.words(&(1..20).collect::<Vec<_>>()).unwrap();
        assert!(words.contains("ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more of 3"), "{words}");
    }

    #[test]
    fn a_folder_that_others_can_enter_is_refused() {
        // SAFETY: no arguments, always succeeds.
        let user = unsafe { libc::geteuid() };
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("f");
        private(&folder, user).unwrap();
        private(&folder, user).unwrap();
        assert!(private(&folder, user + 1).is_err());
        std::os::unix::fs::symlink(&folder, base.path().join("link")).unwrap();
        assert!(private(&base.path().join("link"), user).is_err());
    }
}
