//! TCP over a cable, beside its verbs: whether the address is there, reached, and routed over the cable.

use std::io::{Error, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::doctor::facts::{Facts, Link};
use crate::doctor::gather::Run;

/// How long the peer may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Numbers of macOS and Linux for a host to which there is no way.
const NO_ROUTE: [i32; 2] = [65, 113];
/// macOS's number for an attempt that timed out.
const TIMED_OUT: i32 = 60;

/// This end's door, as long as it is kept.
pub struct Door {
    listener: Option<TcpListener>,
    refused: Option<i32>,
}

impl Door {
    /// On this end's address of the cable, if it has one.
    pub fn open(address: Option<Ipv4Addr>) -> Door {
        match address.map(|address| TcpListener::bind((address, 0))) {
            Some(Ok(listener)) => Door { listener: Some(listener), refused: None },
            Some(Err(e)) => Door { listener: None, refused: Some(number(&e)) },
            None => Door { listener: None, refused: None },
        }
    }

    /// What the other end has to know: a port, or nothing.
    pub fn word(&self) -> Vec<u8> {
        let port = self.listener.as_ref().and_then(|l| l.local_addr().ok()).map(|at| at.port());
        port.map_or(Vec::new(), |port| port.to_le_bytes().to_vec())
    }

    /// Knocks at the other end, whose word this is. The system answers there, whether or not somebody is in.
    pub fn knock(&self, run: &dyn Run, here: &Facts, far: Option<Ipv4Addr>, word: &[u8], link: &mut Link) {
        if let (Some(number), true) = (self.refused, here.system.is_macos()) {
            link.tcp = Some(number);
        }
        let (Some(far), Ok(port), Some(_)) = (far, word.try_into(), &self.listener) else { return };
        let port = u16::from_le_bytes(port);
        let tried = TcpStream::connect_timeout(&SocketAddr::from((far, port)), PATIENCE);
        link.tcp = Some(tried.as_ref().map_or_else(number, |_| 0));
        let far = far.to_string();
        if link.tcp.is_some_and(|n| NO_ROUTE.contains(&n)) && here.system.is_macos() {
            let answer = run.run(&["nc", "-z", "-G", "2", &far, &port.to_string()], 2 * PATIENCE);
            link.others_reach = Some(answer.get().is_some());
        }
        // Of a cable whose interface the system has under its name.
        let own = link.device.strip_prefix("rdma_").unwrap_or_default();
        if here.nics.iter().any(|nic| nic.name == own) {
            let command: &[&str] = match here.system.is_macos() {
                true => &["route", "-n", "get", &far],
                false => &["ip", "-o", "route", "get", &far],
            };
            link.route = run.run(command, 2 * PATIENCE).get().and_then(|text| interface(text));
        }
    }
}

fn number(e: &Error) -> i32 {
    e.raw_os_error().unwrap_or(if e.kind() == ErrorKind::TimedOut { TIMED_OUT } else { 0 })
}

/// `interface: en5` of macOS, `… dev en5 …` of Linux.
fn interface(text: &str) -> Option<String> {
    let mut words = text.split_whitespace();
    words.find(|word| ["interface:", "dev"].contains(word))?;
    words.next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::facts::{Answer, Nic};

    /// A system whose route tells this, and whose `nc` fails.
    struct Says(&'static str);

    impl Run for Says {
        fn run(&self, command: &[&str], _: Duration) -> Answer<String> {
            match command[0] {
                "nc" => Answer::Refused("1".into()),
                _ => Answer::Is(self.0.into()),
            }
        }
    }

    #[test]
    fn an_end_is_reached_or_its_number_is_told() {
        let here = Some(Ipv4Addr::LOCALHOST);
        let door = Door::open(here);
        let mut facts =
            Facts { nics: vec![Nic { name: "en5".into(), ..Nic::default() }], ..Facts::default() };
        let knock = |facts: &Facts, word: &[u8]| {
            let mut link = Link { device: "rdma_en5".into(), ..Link::default() };
            let route = "127.0.0.1 dev en7 src 127.0.0.1";
            Door::open(here).knock(&Says(route), facts, here, word, &mut link);
            (link.tcp, link.route)
        };
        assert_eq!(knock(&facts, &door.word()), (Some(0), Some("en7".into())));
        facts.nics.clear();
        assert_eq!(
            knock(&facts, &door.word()),
            (Some(0), None),
            "a device without an interface has no route"
        );
        let word = door.word();
        drop(door);
        assert_eq!(knock(&facts, &word).0, Some(if cfg!(target_os = "macos") { 61 } else { 111 }));
        assert_eq!(knock(&facts, &[]), (None, None), "who has no door is not called");
    }

    #[test]
    fn an_address_that_is_not_there_is_told_of_macs() {
        // TEST-NET-1: nobody's.
        let absent = Some(Ipv4Addr::new(192, 0, 2, 9));
        let tcp = |os: &str| {
            let mut facts = Facts::default();
            facts.system.os = os.into();
            let mut link = Link::default();
            Door::open(absent).knock(&Says(""), &facts, None, &[], &mut link);
            link.tcp
        };
        assert!(tcp("macos").is_some_and(|n| [49, 99].contains(&n)));
        assert_eq!(tcp("linux"), None, "there an address of a device may be another's");
    }

    #[test]
    fn routes_are_read() {
        let mac =
            "   route to: 10.10.1.2\ndestination: 10.10.1.0\n  interface: en5\n      flags: <UP,DONE>\n";
        assert_eq!(interface(mac).as_deref(), Some("en5"));
        assert_eq!(
            interface("10.10.1.2 dev cable2 src 10.10.1.1 uid 0 \\    cache").as_deref(),
            Some("cable2")
        );
        assert_eq!(interface("network is unreachable"), None);
    }
}
