//! What is played by a seed, and what may come of it.

use fulmen::Error;
use fulmen_emu_verbs::{Call, Kind, Trap};

use crate::seeded::mix;

/// Which seeds: `FULMEN_SEEDS` (`2000`, or `1800..2000`), or the first so many.
pub fn seeds(default: u64) -> std::ops::Range<u64> {
    let number = |text: &str| text.parse().expect("FULMEN_SEEDS is a number, or two with .. between");
    match std::env::var("FULMEN_SEEDS") {
        Err(_) => 0..default,
        Ok(text) => text.split_once("..").map_or_else(|| 0..number(&text), |(a, b)| number(a)..number(b)),
    }
}

/// Whether an error says what a person needs to know; of one's own error nobody is told as of another's.
pub fn is_named(rank: usize, e: &Error) -> bool {
    match e {
        Error::Aborted { by, .. } => *by != rank,
        Error::Corrupt { .. } | Error::PeerLost { .. } | Error::Resources { .. } => true,
        _ => false,
    }
}

/// Whether a rank was found silent. Where nothing was played it was not, but got no core for so long: that is no fault of the
/// code, if it does not come again with more patience.
pub fn is_silence<T>(results: &[Result<T, Error>]) -> bool {
    results.iter().any(|result| result.as_ref().is_err_and(|e| e.to_string().contains("was silent for")))
}

/// What is played by a seed, and whether the job must end well all the same.
pub fn traps(seed: u64) -> (Vec<Trap>, bool) {
    let chance = |kind| vec![Trap { after: 8, ..Trap::with_chance(kind, 0.005) }];
    match seed % 12 {
        0 => (vec![], true),
        1 => (
            vec![
                Trap::always(Kind::NegativeErrno),
                Trap::always(Kind::BadWrUnset),
                Trap::always(Kind::Reorder),
                Trap::always(Kind::OverPostSilent),
                Trap::always(Kind::EarlySendKills),
            ],
            true,
        ),
        2 => (vec![Trap::once_after(Kind::DeadPair { over: (mix(seed, 7) % 2 * 4096) as u32 }, 1)], true),
        3 => {
            let kind =
                if mix(seed, 7).is_multiple_of(2) { Kind::LocalWriteOnly } else { Kind::RemoteFlagsNeeded };
            (vec![Trap::always(kind)], true)
        }
        4 => {
            let refused =
                |call, errno, after| Trap { after, ..Trap::with_chance(Kind::Fail { call, errno }, 0.03) };
            (vec![refused(Call::PostRecv, 12, 60), refused(Call::PostSend, 35, 20)], false)
        }
        5 => (vec![Trap::once_after(Kind::PortDown, 20 + mix(seed, 7) % 200).on("rdma_en01")], false),
        6 | 7 => (chance(Kind::Lost), false),
        8 => (chance(Kind::Duplicated), false),
        9 => (chance(Kind::Foreign), false),
        _ => (chance(Kind::FlippedBit), false),
    }
}
