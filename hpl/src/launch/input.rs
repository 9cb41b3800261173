//! The user's input, on its way to rank 0: never more than rank 0 takes.

use std::io::{IsTerminal, Read};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use fulmen::job::messages::Order;

use super::outbox::Outbox;

/// Bytes that may be on their way.
pub const AHEAD: usize = 1 << 16;

/// Bytes under way to rank 0.
#[derive(Clone, Default)]
pub struct Credit(Arc<(Mutex<usize>, Condvar)>);

impl Credit {
    /// Rank 0 has taken so many.
    pub fn give_back(&self, bytes: usize) {
        let mut under_way = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        *under_way = under_way.saturating_sub(bytes);
        self.0.1.notify_all();
    }

    fn take(&self, bytes: usize) {
        let mut under_way = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        while *under_way + bytes > AHEAD {
            under_way = self.0.1.wait(under_way).unwrap_or_else(PoisonError::into_inner);
        }
        *under_way += bytes;
    }
}

/// Reads standard input to its end, on the calling thread.
pub fn forward(to: &Outbox, credit: &Credit) {
    let mut from = std::io::stdin();
    let terminal = from.is_terminal();
    let mut chunk = vec![0; AHEAD / 4];
    loop {
        match from.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => {
                credit.take(n);
                if !to.send(&Order::Input(chunk[..n].to_vec())) {
                    return;
                }
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            // In the background a terminal gives nothing; it may come to the foreground.
            Err(e) if terminal && e.raw_os_error() == Some(libc::EIO) => {
                std::thread::sleep(Duration::from_millis(200));
            }
            Err(_) => break,
        }
    }
    to.send(&Order::InputEnd);
}
