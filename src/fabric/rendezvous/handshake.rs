//! Proof that both ends of a connection know the job's secret, without I/O.
//!
//! ```text
//! connector                                     acceptor
//!   hello: what for, from, to, size, link, nonce ──▶
//!   ◀── challenge: nonce, HMAC("acceptor", hello, nonce)
//!   proof: HMAC("connector", hello, nonce) ──▶
//!   ◀── welcome: one byte
//! ```
//!
//! Each proof covers both nonces, so that none can be replayed, the role, so that none can be reflected,
//! and the ranks, so that none serves in another place. The acceptor never reads more than
//! [`Acceptor::wants`]: what follows is the connection's.

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::Secret;

const MAGIC: [u8; 8] = *b"fulmen\0\x01";
const HELLO: usize = 8 + 1 + 3 * 4 + 2 + 32;
const MAC: usize = 32;
/// Length of the challenge.
pub const CHALLENGE: usize = 32 + MAC;
/// What an acceptor sends when all is proven.
pub const WELCOME: u8 = b'!';

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// A [`super::AtRankZero`].
    Rendezvous,
    /// A link of the `tcp` fabric.
    Link,
    /// Memory that ranks of one host share.
    Memory,
}

/// Who connects to whom.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    pub purpose: Purpose,
    pub from: u32,
    pub to: u32,
    pub size: u32,
    /// Which of several connections between the two.
    pub link: u16,
}

impl Hello {
    fn encode(&self, nonce: &[u8; 32]) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = self.purpose as u8;
        bytes[9..13].copy_from_slice(&self.from.to_le_bytes());
        bytes[13..17].copy_from_slice(&self.to.to_le_bytes());
        bytes[17..21].copy_from_slice(&self.size.to_le_bytes());
        bytes[21..23].copy_from_slice(&self.link.to_le_bytes());
        bytes[23..].copy_from_slice(nonce);
        bytes
    }

    fn decode(bytes: &[u8; HELLO]) -> Option<Hello> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let purpose = match bytes[8] {
            0 => Purpose::Rendezvous,
            1 => Purpose::Link,
            2 => Purpose::Memory,
            _ => return None,
        };
        let link = u16::from_le_bytes([bytes[21], bytes[22]]);
        let hello = Hello { purpose, from: word(9), to: word(13), size: word(17), link };
        (bytes[..8] == MAGIC).then_some(hello)
    }
}

fn mac(secret: &Secret, role: &[u8], hello: &[u8; HELLO], nonce: &[u8]) -> Hmac<Sha256> {
    let mut mac = secret.mac();
    mac.update(role);
    mac.update(hello);
    mac.update(nonce);
    mac
}

/// The end that connects.
pub struct Connector {
    secret: Secret,
    hello: [u8; HELLO],
}

impl Connector {
    pub fn new(secret: &Secret, hello: &Hello, nonce: [u8; 32]) -> Self {
        Connector { secret: secret.clone(), hello: hello.encode(&nonce) }
    }

    /// To be sent first.
    pub fn hello(&self) -> &[u8] {
        &self.hello
    }

    /// The proof that answers the challenge; `None` when the acceptor does not know the secret.
    pub fn prove(&self, challenge: &[u8; CHALLENGE]) -> Option<[u8; MAC]> {
        let (nonce, theirs) = challenge.split_at(32);
        mac(&self.secret, b"acceptor", &self.hello, nonce).verify_slice(theirs).ok()?;
        Some(mac(&self.secret, b"connector", &self.hello, nonce).finalize().into_bytes().into())
    }
}

/// The end that listens.
pub struct Acceptor {
    secret: Secret,
    nonce: [u8; 32],
    /// Who it expects: `from` and `link` are the connector's to say.
    expected: Hello,
    received: Vec<u8>,
    hello: Option<(Hello, [u8; HELLO])>,
}

/// What comes of bytes that arrived.
#[derive(Debug)]
pub enum Step {
    /// More are needed.
    More,
    /// This is to be sent, and more are needed.
    Send([u8; CHALLENGE]),
    /// The connector knows the secret. [`WELCOME`] is to be sent.
    Proven(Hello),
    /// It does not, or wants something else: the connection is to be closed.
    Refused,
}

impl Acceptor {
    /// For rank `me` of `size`.
    pub fn new(secret: &Secret, purpose: Purpose, me: u32, size: u32, nonce: [u8; 32]) -> Self {
        let expected = Hello { purpose, from: 0, to: me, size, link: 0 };
        Acceptor { secret: secret.clone(), nonce, expected, received: Vec::with_capacity(HELLO), hello: None }
    }

    /// How many bytes it can use now.
    pub fn wants(&self) -> usize {
        (if self.hello.is_some() { MAC } else { HELLO }) - self.received.len()
    }

    /// Takes bytes that arrived: at most [`Acceptor::wants`].
    pub fn take(&mut self, bytes: &[u8]) -> Step {
        if bytes.len() > self.wants() {
            return Step::Refused;
        }
        self.received.extend_from_slice(bytes);
        // A stranger is told from its first bytes on.
        if self.hello.is_none() && !MAGIC.starts_with(&self.received[..self.received.len().min(8)]) {
            return Step::Refused;
        }
        if self.wants() > 0 {
            return Step::More;
        }
        let received = std::mem::take(&mut self.received);
        match self.hello {
            None => self.challenge(&received),
            Some((hello, bytes)) => {
                let proof = mac(&self.secret, b"connector", &bytes, &self.nonce);
                if proof.verify_slice(&received).is_ok() { Step::Proven(hello) } else { Step::Refused }
            }
        }
    }

    fn challenge(&mut self, received: &[u8]) -> Step {
        let Ok(bytes) = <[u8; HELLO]>::try_from(received) else { return Step::Refused };
        let Some(hello) = Hello::decode(&bytes) else { return Step::Refused };
        // Ranks that disagree on their number are told so, once they have proven to be of this job.
        let size = if hello.purpose == Purpose::Rendezvous { hello.size } else { self.expected.size };
        let expected = Hello { from: hello.from, link: hello.link, size, ..self.expected };
        if hello != expected || hello.from >= hello.size || hello.from == hello.to {
            return Step::Refused;
        }
        self.hello = Some((hello, bytes));
        let mut challenge = [0; CHALLENGE];
        challenge[..32].copy_from_slice(&self.nonce);
        let mine = mac(&self.secret, b"acceptor", &bytes, &self.nonce).finalize().into_bytes();
        challenge[32..].copy_from_slice(&mine);
        Step::Send(challenge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HELLO_1: Hello = Hello { purpose: Purpose::Link, from: 3, to: 1, size: 4, link: 2 };

    fn secret(byte: u8) -> Secret {
        Secret::from_bytes([byte; 32])
    }

    fn acceptor(nonce: u8) -> Acceptor {
        Acceptor::new(&secret(7), Purpose::Link, 1, 4, [nonce; 32])
    }

    fn challenge_to(acceptor: &mut Acceptor, hello: &[u8]) -> Option<[u8; CHALLENGE]> {
        match acceptor.take(hello) {
            Step::Send(challenge) => Some(challenge),
            _ => None,
        }
    }

    #[test]
    fn who_knows_the_secret_gets_in_however_the_bytes_are_cut() {
        for cut in 1..HELLO {
            let connector = Connector::new(&secret(7), &HELLO_1, [1; 32]);
            let mut acceptor = acceptor(2);
            let mut got = None;
            for piece in connector.hello().chunks(cut) {
                match acceptor.take(piece) {
                    Step::Send(challenge) => got = Some(challenge),
                    step => assert!(matches!(step, Step::More), "{step:?}"),
                }
            }
            let proof = connector.prove(&got.unwrap()).unwrap();
            let mut end = Step::More;
            for piece in proof.chunks(cut.min(MAC)) {
                end = acceptor.take(piece);
            }
            assert!(matches!(end, Step::Proven(hello) if hello == HELLO_1), "{end:?}");
        }
    }

    #[test]
    fn another_secret_is_found_by_both_sides() {
        let (mine, theirs) =
            (Connector::new(&secret(8), &HELLO_1, [1; 32]), Connector::new(&secret(7), &HELLO_1, [1; 32]));
        let mut first = acceptor(2);
        let challenge = challenge_to(&mut first, mine.hello()).unwrap();
        assert!(mine.prove(&challenge).is_none(), "the acceptor has another secret");
        // Even the right hello with a proof by the wrong secret does not get in.
        assert!(theirs.prove(&challenge).is_some());
        let forged = mac(&secret(8), b"connector", &mine.hello, &challenge[..32]).finalize().into_bytes();
        assert!(matches!(first.take(&forged), Step::Refused));
    }

    #[test]
    fn replay_and_reflection_are_useless() {
        let connector = Connector::new(&secret(7), &HELLO_1, [1; 32]);
        let mut first = acceptor(2);
        let challenge = challenge_to(&mut first, connector.hello()).unwrap();
        let proof = connector.prove(&challenge).unwrap();
        assert!(matches!(first.take(&proof), Step::Proven(_)));
        // Replayed to a later acceptor, which has another nonce.
        let mut second = acceptor(3);
        challenge_to(&mut second, connector.hello()).unwrap();
        assert!(matches!(second.take(&proof), Step::Refused));
        // The acceptor's own words sent back.
        let mut third = acceptor(2);
        let challenge = challenge_to(&mut third, connector.hello()).unwrap();
        assert!(matches!(third.take(&challenge[32..]), Step::Refused));
        // An old challenge for a new connector.
        assert!(Connector::new(&secret(7), &HELLO_1, [9; 32]).prove(&challenge).is_none());
    }

    #[test]
    fn a_proof_holds_for_its_place_only() {
        for wrong in [
            Hello { to: 2, ..HELLO_1 },
            Hello { size: 5, ..HELLO_1 },
            Hello { from: 4, ..HELLO_1 },
            Hello { from: 1, ..HELLO_1 },
            Hello { purpose: Purpose::Rendezvous, ..HELLO_1 },
        ] {
            let connector = Connector::new(&secret(7), &wrong, [1; 32]);
            assert!(matches!(acceptor(2).take(connector.hello()), Step::Refused), "{wrong:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn nothing_else_gets_in(bytes: Vec<u8>, flip in 0..HELLO * 8 + MAC * 8, cut in 1usize..80) {
            // Whatever comes.
            let mut stranger = acceptor(2);
            for piece in bytes.chunks(cut) {
                let wants = stranger.wants().min(piece.len());
                prop_assert!(!matches!(stranger.take(&piece[..wants]), Step::Proven(_)));
            }
            // A true connection with one bit wrong.
            let connector = Connector::new(&secret(7), &HELLO_1, [1; 32]);
            let mut hello = connector.hello().to_vec();
            let (byte, bit) = (flip / 8, 1 << (flip % 8));
            if byte < HELLO {
                hello[byte] ^= bit;
            }
            let mut acceptor = acceptor(2);
            if let Some(challenge) = challenge_to(&mut acceptor, &hello) {
                // A changed hello is found by the connector; it would go on only if it lied.
                let proof = connector.prove(&challenge);
                prop_assert_eq!(proof.is_some(), byte >= HELLO);
                let mut proof = proof.unwrap_or([0; MAC]);
                if byte >= HELLO {
                    proof[byte - HELLO] ^= bit;
                }
                prop_assert!(matches!(acceptor.take(&proof), Step::Refused));
            }
        }
    }
}
