//! `fulmen-run` and `hpl-run` between hosts that `ci/hosts` makes: a real ssh, real networks, real failures. Skipped, with the
//! reason, where there is no root or no sshd.

mod cases;
mod doctor;
mod faults;
mod lab;
mod links;
mod shapes;
