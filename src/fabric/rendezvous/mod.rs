//! How the ranks of a job find and trust each other before they have a fabric.
//!
//! [`in_process`] serves threads, [`AtRankZero`] processes that know one address. Both ends of every
//! connection prove that they know the job's [`Secret`] before a byte of it is used; what travels is
//! authenticated at connect, not encrypted.

mod at_rank_zero;
pub(crate) mod door;
pub(crate) mod handshake;
mod in_process;

pub use at_rank_zero::AtRankZero;
pub use in_process::{InProcess, in_process};

use hmac::{Hmac, KeyInit};
use sha2::Sha256;
use zeroize::Zeroize;

use crate::error::{Error, Result};

/// How the ranks of a job find each other before they have a fabric.
pub trait Rendezvous: Send {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Everyone's bytes, by rank; collective, in the same order on every rank; ends by the job's start
    /// deadline.
    ///
    /// # Errors
    /// [`Error::Unreachable`] when a rank did not come, or went, with its number.
    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>>;
}

/// Everyone's value; collective, as [`Rendezvous::all_gather`].
pub(crate) fn gather<T: serde::Serialize + serde::de::DeserializeOwned>(
    rendezvous: &mut dyn Rendezvous,
    mine: &T,
) -> Result<Vec<T>> {
    let garbled = |e: postcard::Error| Error::Internal(format!("a message of the rendezvous: {e}"));
    let all = rendezvous.all_gather(&postcard::to_stdvec(mine).map_err(garbled)?)?;
    all.iter().map(|bytes| postcard::from_bytes(bytes).map_err(garbled)).collect()
}

/// 32 random bytes that only the job's processes know. Wiped on drop, and printed by nothing.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A new one, from the system's generator.
    ///
    /// # Errors
    /// [`Error::System`] when the system has no randomness to give.
    pub fn random() -> Result<Self> {
        Ok(Secret(random()?))
    }

    /// The secret that a launcher passed on.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Secret(bytes)
    }

    /// The bytes, for passing it on: over a pipe, never on a command line, in the environment or a log.
    pub fn expose(&self) -> &[u8; 32] {
        &self.0
    }

    /// Begins a proof that its maker knows the secret: what is proved is to be added.
    pub(crate) fn mac(&self) -> Hmac<Sha256> {
        // HMAC's key is a block of the hash, filled up with zeros.
        let mut key = [0; 64];
        key[..32].copy_from_slice(&self.0);
        let mac = Hmac::<Sha256>::new((&key).into());
        key.zeroize();
        mac
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

/// 32 bytes from the system's generator.
pub(crate) fn random() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|e| Error::System {
        what: "no random bytes for the job's secret".into(),
        os: e.to_string(),
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_not_printed() {
        let secret = Secret::from_bytes([0x5A; 32]);
        assert_eq!(format!("{secret:?} {secret:#?}"), "Secret Secret");
        assert_eq!(secret.expose(), &[0x5A; 32]);
        assert_ne!(Secret::random().unwrap().expose(), Secret::random().unwrap().expose());
    }
}
