//! `hpl-run`: see the library of this package.

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use fulmen_hpl::cli::Cli;
use fulmen_hpl::local::Local;
use fulmen_hpl::machine::Host;
use fulmen_hpl::{job, session, worker};

fn main() -> ExitCode {
    if let Some(code) = worker::run_if_asked() {
        return code;
    }
    match fulmen::Job::from_env() {
        Ok(None) => {}
        Ok(Some(of)) => return job::run(of),
        Err(e) => {
            eprintln!("hpl-run: {e}");
            return e.exit_code().into();
        }
    }
    let cli = Cli::parse();
    session::run(&cli, Path::new(""), &Host::detect(), &mut Local::default()).into()
}
