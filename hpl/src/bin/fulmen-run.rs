//! `fulmen-run`: see `launch` in the library of this package.

use std::process::ExitCode;

fn main() -> ExitCode {
    fulmen_hpl::launch::main().into()
}
