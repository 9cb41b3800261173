//! `fulmen-run`: starts the ranks of a program on hosts, and sees that none outlives the job.
//!
//! The same program is all three: the launcher, which the user calls ([`run`]; its decisions are
//! [`conduct`]'s); an agent on each host, which the launcher starts over ssh, or beside itself ([`agent`]);
//! and a guard beside each agent ([`guard`]). What they tell each other is in `fulmen::job::messages`.
//!
//! Where hosts are many, agents start further agents ([`branch`]). Only whom an order or a word passes through is then another:
//! the launcher decides for all ([`conduct`]), and hears each agent by its number ([`ears`]).

pub mod agent;
pub mod branch;
pub mod cables;
mod children;
pub mod cli;
pub mod conduct;
pub mod ears;
pub mod guard;
pub mod hosts;
pub mod input;
pub mod link;
pub mod outbox;
pub mod output;
pub mod place;
pub mod program;
pub mod run;
pub mod signals;
pub mod ssh;

use clap::Parser;

use crate::limits;

/// The whole of `fulmen-run`, in any of its parts; the exit code.
pub fn main() -> u8 {
    crate::interrupt::hear();
    limits::tell_of_file_sizes();
    let mut args = std::env::args_os();
    match args.nth(1).as_deref().and_then(|a| a.to_str()) {
        Some(agent::ARGUMENT) => return agent::run(args.next().map(Into::into)),
        Some(guard::ARGUMENT) => {
            guard::run();
            return 0;
        }
        _ => {}
    }
    run::run(&cli::Cli::parse_from(cli::with_two_dashes(std::env::args_os())))
}
