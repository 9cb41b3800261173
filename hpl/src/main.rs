//! `hpl-run`: see the library of this package.

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use fulmen_hpl::cli::{Cli, Command};
use fulmen_hpl::exit::Failure;
use fulmen_hpl::local::Local;
use fulmen_hpl::machine::Host;
use fulmen_hpl::{doctor, interrupt, job, limits, session, worker};

/// The job of which this process is a rank, if it is; who is told to end while the ranks look for each other does so in order.
fn of_a_job() -> fulmen::Result<Option<fulmen::Job>> {
    interrupt::listen();
    let job = fulmen::Job::from_env_unless(|| interrupt::count() > 0)?;
    interrupt::stop_listening().map(|()| job)
}

fn main() -> ExitCode {
    interrupt::hear();
    limits::tell_of_file_sizes();
    limits::leave_time_to_end();
    if let Some(code) = worker::run_if_asked() {
        return code;
    }
    // Who tries devices for a rank inherits its environment, and is none itself.
    let asked = Cli::try_parse().ok().and_then(|cli| cli.command);
    let probes = matches!(&asked, Some(Command::Doctor(options)) if options.is_child());
    match if probes { Ok(None) } else { of_a_job() } {
        Ok(None) => {}
        Ok(Some(of)) => return job::run(of),
        Err(e) => {
            eprintln!("hpl-run: {}", interrupt::told(&e));
            return e.exit_code().into();
        }
    }
    let mut cli = Cli::parse();
    if let Some(Command::Doctor(options)) = &cli.command {
        interrupt::listen();
        let told = doctor::run(options, &mut std::io::stdout()).map_err(Failure::from);
        return told
            .unwrap_or_else(|failure| {
                eprintln!("{failure}");
                failure.status()
            })
            .into();
    }
    if let Err(e) = cli.fabric_of(std::env::var(fulmen::job::env::FABRIC).ok()) {
        eprintln!("hpl-run: {e}");
        return e.exit_code().into();
    }
    session::run(&cli, Path::new(""), &Host::detect(), &mut Local::default()).into()
}
