//! What certificate rules ask for (SCC's: `cert-{N}-hpl.*`): the report, its input, the command, the time
//! stamps and the configuration, in one folder.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use fulmen::Error;

use super::file::Target;
use super::{Job, Outcome, json};
use crate::dat;
use crate::machine::Host;
use crate::params::{Input, Sink};
use crate::units;

/// What goes into a bundle.
#[derive(Clone, Copy, Debug)]
pub struct Bundle<'a> {
    /// The runs' parameters.
    pub input: &'a Input,
    /// The `HPL.out` text.
    pub text: &'a [u8],
    /// The runs.
    pub outcomes: &'a [Outcome],
    /// The job.
    pub job: &'a Job,
    /// The machine.
    pub host: &'a Host,
    /// The command line.
    pub command: &'a str,
    /// Where the files are.
    pub folder: &'a Path,
}

/// Makes the folder, before any work, and tries whether it can be written to.
///
/// # Errors
/// [`Error::Argument`].
pub fn prepare(folder: &Path) -> Result<(), Error> {
    let tried = std::fs::create_dir_all(folder).and_then(|()| {
        let probe = folder.join(format!(".bundle.{}", std::process::id()));
        std::fs::write(&probe, "").and_then(|()| std::fs::remove_file(&probe))
    });
    tried.map_err(|e| {
        let remedy = "nothing was run; name a folder that you may write to";
        Error::argument("--bundle", folder.display(), format!("cannot be written: {e}"), remedy)
    })
}

/// The five files: report, input, command, time stamps, configuration.
pub fn names(input: &Input, folder: &Path) -> [PathBuf; 5] {
    let n = input.ns.iter().copied().max().unwrap_or(0);
    ["hpl.rslts", "hpl.input", "hpl.run", "hpl.tstamps", "configuration.txt"]
        .map(|name| folder.join(format!("cert-{n}-{name}")))
}

/// A command line that a shell reads as these arguments.
pub fn quoted(arguments: impl IntoIterator<Item = String>) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./=,:+@%".contains(c);
    let quote = |argument: String| {
        if !argument.is_empty() && argument.chars().all(plain) {
            argument
        } else {
            format!("'{}'", argument.replace('\'', r"'\''"))
        }
    };
    arguments.into_iter().map(quote).collect::<Vec<_>>().join(" ")
}

/// Opens the five files in a folder that is there, before any work. No other job writes them until they are complete.
///
/// # Errors
/// [`Error::Argument`].
pub fn open(input: &Input, folder: &Path) -> Result<Vec<Target>, Error> {
    names(input, folder).into_iter().map(|path| Target::open(&Sink::File(path), "--bundle")).collect()
}

impl Bundle<'_> {
    /// Writes the five files ([`open`]) and returns how many they are. Existing ones are replaced, all or none: they take their
    /// places when all are written.
    ///
    /// # Errors
    /// Of the file system.
    pub fn write(&self, mut targets: Vec<Target>) -> io::Result<usize> {
        let mut stamps = String::new();
        for o in self.outcomes {
            let r = &o.run;
            stamps += &format!(
                "{} N {} NB {} P {} Q {}: start {} end {} seconds {:.2}\n",
                r.tv(),
                r.n,
                r.nb,
                r.p,
                r.q,
                json::utc(o.started),
                json::utc(o.ended),
                o.seconds
            );
        }
        let contents = [
            self.text.to_vec(),
            dat::write(self.input).into_bytes(),
            format!("{}\n", self.command).into_bytes(),
            stamps.into_bytes(),
            self.configuration().into_bytes(),
        ];
        for (target, bytes) in targets.iter_mut().zip(contents) {
            target.write_all(&bytes)?;
            target.settle_on_disk()?;
        }
        let all = targets.len();
        // What has come there meanwhile is found before the first takes its place.
        if let Some(path) = names(self.input, self.folder).iter().find(|path| path.is_dir()) {
            return Err(io::Error::other(format!("{}: it is a folder", path.display())));
        }
        targets.into_iter().try_for_each(|target| target.complete().map(drop))?;
        Ok(all)
    }

    fn configuration(&self) -> String {
        let Bundle { job, host, .. } = self;
        let memory = host.available.map_or("unknown".to_string(), |b| units::bytes(u128::from(b)));
        let gemm = job.gemm_gflops.map_or("not measured".to_string(), units::rate);
        format!(
            "program    fulmen {}\nsystem     {} {}\ncores      {}\nmemory     {memory} available\n\
             ranks      {}\nthreads    {} a rank\nfabric     {}\nkernels    {} (self-test {})\ndgemm      {gemm}\n\
             seed       {}\n",
            env!("CARGO_PKG_VERSION"),
            std::env::consts::OS,
            std::env::consts::ARCH,
            host.cores,
            job.ranks,
            job.threads,
            job.fabric,
            job.kernels,
            job.self_test,
            self.input.seed,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the arguments, a shell gets them back.
        #[test]
        fn a_shell_reads_what_was_typed(arguments in proptest::collection::vec("[ -~\u{e4}\n]{0,12}", 1..5)) {
            let line = quoted(arguments.clone());
            let script = format!("for a in {line}; do printf '%s\\000' \"$a\"; done");
            let out = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
            let read = String::from_utf8(out.stdout).unwrap();
            let read: Vec<&str> = read.split_terminator('\0').collect();
            prop_assert_eq!(read, arguments);
        }
    }
}
