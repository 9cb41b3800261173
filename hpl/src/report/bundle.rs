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

impl Bundle<'_> {
    /// Writes the five files and returns their names. Existing ones are replaced.
    ///
    /// # Errors
    /// Of the file system.
    pub fn write(&self, folder: &Path) -> io::Result<Vec<PathBuf>> {
        let n = self.input.ns.iter().copied().max().unwrap_or(0);
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
        let files = [
            (format!("cert-{n}-hpl.rslts"), self.text.to_vec()),
            (format!("cert-{n}-hpl.input"), dat::write(self.input).into_bytes()),
            (format!("cert-{n}-hpl.run"), format!("{}\n", self.command).into_bytes()),
            (format!("cert-{n}-hpl.tstamps"), stamps.into_bytes()),
            (format!("cert-{n}-configuration.txt"), self.configuration().into_bytes()),
        ];
        let mut written = vec![];
        for (name, bytes) in files {
            let path = folder.join(name);
            let mut target = Target::open(&Sink::File(path.clone()), "--bundle").map_err(io::Error::other)?;
            target.write_all(&bytes)?;
            target.complete()?;
            written.push(path);
        }
        Ok(written)
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
