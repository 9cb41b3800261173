//! `hpl-run`: see the library of this package.

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use fulmen_hpl::cli::Cli;
use fulmen_hpl::machine::Host;
use fulmen_hpl::{driver, session};

fn main() -> ExitCode {
    let cli = Cli::parse();
    session::run(&cli, Path::new(""), &Host::detect(), &mut driver::Absent).into()
}
