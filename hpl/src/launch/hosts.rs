//! Which hosts there are: `--host`, a hostfile in any of three dialects, or a Slurm allocation.
//!
//! | dialect | a line |
//! |---|---|
//! | Open MPI | `name slots=4 max_slots=8` |
//! | MPICH | `name:4` |
//! | `mlx.launch` | a JSON list of `{"ssh": name, "ips": [...]}`, or an object whose `hosts` is one |
//!
//! All know `#` comments; names may be written with ranges, `n[01-12]`. A host that is named twice has the
//! slots of both; one without a number has as many as are needed.

use std::net::IpAddr;

use fulmen::job::env::{Variables, addresses, expand, slurm_counts};
use fulmen::{Error, Result};

use crate::doctor::mlx::Cables;

/// A host that ranks can be started on.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Host {
    /// As the user calls it: a name that ssh understands.
    pub name: String,
    /// Ranks that it should take; `None`: whatever is needed.
    pub slots: Option<usize>,
    /// Ranks that it may take at most.
    pub most: Option<usize>,
    /// Addresses at which the other hosts are to reach it first, if the file says.
    pub addresses: Vec<IpAddr>,
}

impl Host {
    fn named(name: impl Into<String>) -> Host {
        Host { name: name.into(), ..Host::default() }
    }
}

/// The hosts of `--host a,b:2,n[1-3]`.
///
/// # Errors
/// [`Error::Argument`] naming the word that makes no sense.
pub fn from_list(list: &str) -> Result<Vec<Host>> {
    if list.trim().is_empty() {
        return Err(Error::argument(
            "--host",
            "''",
            "is empty",
            "write as in --host a,b:2; without it ranks are started here",
        ));
    }
    let mut hosts = vec![];
    for word in split(list) {
        hosts.extend(words("--host", list, word.trim())?);
    }
    merge("--host", list, hosts)
}

/// Splits at commas outside of brackets.
fn split(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0i32, 0, vec![]);
    for (at, c) in list.char_indices() {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    parts
}

/// The hosts of a hostfile; `file` is its name in messages.
///
/// # Errors
/// [`Error::Argument`] naming file and line.
pub fn from_file(file: &str, bytes: &[u8]) -> Result<Vec<Host>> {
    let text = String::from_utf8_lossy(bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes));
    if is_json(&text) {
        return from_json(file, &text);
    }
    let mut hosts = vec![];
    for (i, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let place = format!("{file}:{}", i + 1);
        let mut fields = line.split_whitespace();
        let mut these = words(&place, line, fields.next().unwrap_or_default())?;
        // `slots = 4` is `slots=4`.
        let rest = fields.collect::<Vec<_>>().join(" ").replace(" =", "=").replace("= ", "=");
        for field in rest.split_whitespace() {
            let wrong = |problem: &str| {
                let remedy = "write `name slots=4 max_slots=8`, `name:4`, or `name`";
                Error::argument(place.clone(), line, problem, remedy)
            };
            let (key, value) = field.split_once('=').ok_or_else(|| {
                wrong(&format!("has `{field}`, which is no slots=NUMBER or max_slots=NUMBER"))
            })?;
            let count = |least: usize| match value.parse::<usize>() {
                Ok(n) if n >= least && n <= 1 << 20 => Ok(n),
                _ => Err(wrong(&format!("has `{field}`: a whole number is needed"))),
            };
            match key {
                "slots" | "count" | "cpu" => {
                    let n = count(0)?;
                    these.iter_mut().for_each(|h| h.slots = Some(n));
                }
                "max_slots" | "max-slots" => {
                    let n = count(1)?;
                    these.iter_mut().for_each(|h| h.most = Some(n));
                }
                // MPICH's and mpd's ways to choose an interface or a user; ssh's own config does that.
                "binding" | "ifhn" | "user" => {}
                _ => return Err(wrong(&format!("has `{field}`, which means nothing here"))),
            }
        }
        hosts.extend(these);
    }
    merge(file, "", hosts)
}

/// Whether a hostfile is mlx.launch's.
pub fn is_json(text: &str) -> bool {
    let text = text.trim_start();
    text.starts_with('{') || text.starts_with('[') && bracketed(text).is_none()
}

fn is_ipv6(name: &str) -> bool {
    name.split('%').next().is_some_and(|address| address.parse::<std::net::Ipv6Addr>().is_ok())
}

/// An IPv6 address in brackets, and what follows.
fn bracketed(text: &str) -> Option<(&str, &str)> {
    text.strip_prefix('[')?.split_once(']').filter(|(name, _)| is_ipv6(name))
}

/// One word: a name with ranges, or MPICH's `name:slots`.
fn words(place: &str, line: &str, word: &str) -> Result<Vec<Host>> {
    let wrong = |problem: &str| {
        Error::argument(place, line, problem, "write host names as ssh knows them, `name:4`, or `n[01-12]`")
    };
    // Open MPI's.
    if let Some(name) = word.strip_prefix('^') {
        return Err(wrong(&format!(
            "has `{word}`: no host can be excluded; leave {name} out of the list instead"
        )));
    }
    if word.starts_with('+') {
        return Err(wrong(&format!(
            "has `{word}`: hosts are not counted from the allocation; give their names"
        )));
    }
    // An IPv6 address is bare, or in brackets.
    if let Some((name, rest)) = bracketed(word) {
        let slots = match rest {
            "" => None,
            rest => match rest.strip_prefix(':').and_then(|n| n.parse().ok()) {
                Some(slots) if (1..=1 << 20).contains(&slots) => Some(slots),
                _ => return Err(wrong(&format!("has `{word}`, where no number of ranks follows :"))),
            },
        };
        return Ok(vec![Host { slots, ..Host::named(name) }]);
    }
    let (name, slots) = match word.rsplit_once(':') {
        Some((name, _)) if name.contains(':') && !is_ipv6(word) => {
            return Err(wrong(&format!("has `{word}`, which is neither `name:slots` nor an IPv6 address")));
        }
        Some((name, slots)) if !name.contains(':') => {
            let slots = slots.parse::<usize>().ok().filter(|n| (1..=1 << 20).contains(n));
            (
                name,
                Some(
                    slots
                        .ok_or_else(|| wrong(&format!("has `{word}`, where no number of ranks follows :")))?,
                ),
            )
        }
        _ => (word, None),
    };
    let names = if name.contains(['[', ']']) { expand(place, name)? } else { vec![name.to_string()] };
    names
        .into_iter()
        .map(|name| {
            let odd = |c: char| c.is_whitespace() || c.is_control() || "'\"`$&|;<>(){}\\*?!,".contains(c);
            // ssh would take a leading dash for an option.
            match name.is_empty() || name.starts_with('-') || name.contains(odd) {
                true => Err(wrong(&format!("has `{name}`, which is no host name"))),
                false => Ok(Host { slots, ..Host::named(name) }),
            }
        })
        .collect()
}

fn from_json(file: &str, text: &str) -> Result<Vec<Host>> {
    let cables = Cables::parse(text, file)?;
    if cables.is_bare() {
        let problem = "is a device matrix, which names no host";
        let remedy =
            "write [{\"ssh\": \"host1\", \"ips\": [\"10.0.0.1\"], \"rdma\": [null, \"rdma_en5\"]}, ...]";
        return Err(Error::argument(file, "JSON", problem, remedy));
    }
    // For JACCL they are where rank 0 is met, on whatever network.
    let ips_carry_data = match cables.backend.as_str() {
        "" => cables.hosts.iter().all(|host| host.devices.is_empty()),
        backend => backend == "ring",
    };
    let mut hosts = vec![];
    for host in cables.hosts {
        let mut named = words(file, &host.name, &host.name)?;
        if ips_carry_data && !host.ips.is_empty() {
            let place = format!("{file}: `ips` of {}", host.name);
            let ips = addresses(&place, &host.ips.join(","))?;
            named.iter_mut().for_each(|h| h.addresses.clone_from(&ips));
        }
        for h in &mut named {
            // mlx starts one rank for each entry.
            h.slots = h.slots.or(Some(1));
        }
        hosts.extend(named);
    }
    merge(file, "", hosts)
}

/// Same names become one host, in the order of first mention.
fn merge(place: &str, value: &str, all: Vec<Host>) -> Result<Vec<Host>> {
    let mut hosts: Vec<Host> = vec![];
    for host in all {
        match hosts.iter_mut().find(|h| h.name == host.name) {
            // A line without a number stands for one rank when it is not the only one.
            Some(seen) => {
                seen.slots = Some(seen.slots.unwrap_or(1) + host.slots.unwrap_or(1));
                seen.most = match (seen.most, host.most) {
                    (Some(a), Some(b)) => Some(a + b),
                    (a, b) => a.or(b),
                };
                for address in host.addresses {
                    if !seen.addresses.contains(&address) {
                        seen.addresses.push(address);
                    }
                }
            }
            None => hosts.push(host),
        }
    }
    hosts.retain(|h| h.slots != Some(0));
    match hosts.is_empty() {
        true => {
            let (name, value) = if value.is_empty() { ("--hostfile", place) } else { (place, value) };
            let remedy = "write one host a line, or leave it away";
            Err(Error::argument(name, value, "names no host with a slot", remedy))
        }
        false => Ok(hosts),
    }
}

/// The hosts of the Slurm allocation that this process is in, if it is in one.
///
/// # Errors
/// [`Error::Argument`] naming the variable that makes no sense.
pub fn from_slurm(vars: &Variables) -> Result<Option<Vec<Host>>> {
    let Some(list) = vars.get("SLURM_JOB_NODELIST").or_else(|| vars.get("SLURM_NODELIST")) else {
        return Ok(None);
    };
    let names = expand("SLURM_JOB_NODELIST", list)?;
    let (variable, counts) = match (vars.get("SLURM_TASKS_PER_NODE"), vars.get("SLURM_JOB_CPUS_PER_NODE")) {
        (Some(tasks), _) => ("SLURM_TASKS_PER_NODE", Some(tasks)),
        (None, cpus) => ("SLURM_JOB_CPUS_PER_NODE", cpus),
    };
    let slots = counts.map(|text| slurm_counts(variable, text)).transpose()?;
    if let (Some(slots), Some(text)) = (&slots, counts)
        && slots.len() != names.len()
    {
        let problem = format!("has {} numbers, SLURM_JOB_NODELIST has {} hosts", slots.len(), names.len());
        return Err(Error::argument(variable, text, problem, "give the hosts with --host"));
    }
    let of = |i: usize| slots.as_ref().map(|s| s[i]);
    let hosts = names.into_iter().enumerate().map(|(i, name)| Host { slots: of(i), ..Host::named(name) });
    merge("SLURM_JOB_NODELIST", list, hosts.collect()).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parsed(text: &str) -> Vec<(String, Option<usize>, Option<usize>)> {
        from_file("hosts", text.as_bytes()).unwrap().into_iter().map(|h| (h.name, h.slots, h.most)).collect()
    }

    fn one(name: &str, slots: Option<usize>, most: Option<usize>) -> (String, Option<usize>, Option<usize>) {
        (name.to_string(), slots, most)
    }

    #[test]
    fn addresses_and_what_only_looks_like_one() {
        let named = |list: &str| {
            from_list(list).map(|h| h.into_iter().map(|h| (h.name, h.slots)).collect::<Vec<_>>())
        };
        let name = |name: &str, slots: Option<usize>| vec![(name.to_string(), slots)];
        assert_eq!(named("::1").unwrap(), name("::1", None));
        assert_eq!(named("[::1]").unwrap(), name("::1", None));
        assert_eq!(named("[fe80::1%en5]:3").unwrap(), name("fe80::1%en5", Some(3)));
        assert_eq!(parsed("[::1] slots=2"), [one("::1", Some(2), None)]);
        for (wrong, why) in [
            ("h1:0", "has `h1:0`, where no number of ranks follows :"),
            ("h1:2:3", "has `h1:2:3`, which is neither `name:slots` nor an IPv6 address"),
            ("[::1]:0", "no number of ranks follows"),
            ("[::1]2", "no number of ranks follows"),
            ("", "is empty"),
            (" ", "is empty"),
            (",", "is no host name"),
            ("a,^b", "has `^b`: no host can be excluded; leave b out"),
            ("+n0", "has `+n0`: hosts are not counted"),
            ("a\u{1b}[31m", r"a\u{1b}[31m"),
        ] {
            let error = named(wrong).unwrap_err().to_string();
            assert!(error.contains(why) && !error.contains('\u{1b}'), "{wrong}: {error}");
        }
        for empty in ["", "# nobody\n\r\n", "a slots=0\n"] {
            let error = from_file("hosts", empty.as_bytes()).unwrap_err().to_string();
            assert!(
                error.starts_with("--hostfile: hosts: names") && error.contains("names no host with a slot"),
                "{error}"
            );
        }
    }

    #[test]
    fn k7_02_files_that_crash_others() {
        assert_eq!(parsed("localhost"), [one("localhost", None, None)]);
        assert_eq!(parsed("localhost\nlocalhost\n"), [one("localhost", Some(2), None)]);
        assert_eq!(parsed("a\r\nb\r\n"), [one("a", None, None), one("b", None, None)]);
        assert_eq!(parsed("localhost:2"), [one("localhost", Some(2), None)]);
        assert_eq!(parsed("localhost slots=2 max_slots=4 # c"), [one("localhost", Some(2), Some(4))]);
    }

    #[test]
    fn the_dialects() {
        let text = "\u{feff}# a comment\n\n  n[01-02] slots = 4\t# trailing\nc:3\nn01 slots=1 max-slots=6\nfe80::1%en5\n";
        assert_eq!(
            parsed(text),
            [
                one("n01", Some(5), Some(6)),
                one("n02", Some(4), None),
                one("c", Some(3), None),
                one("fe80::1%en5", None, None)
            ]
        );
        assert_eq!(parsed("user@a slots=0\nb"), [one("b", None, None)]);
    }

    #[test]
    fn mlx_launch() {
        let ring = r#"[{"ssh": "mac-a", "ips": ["10.0.0.1", "fe80::1%en5"]}, {"ssh": "mac-b", "ips": []}]"#;
        let hosts = from_file("x.json", ring.as_bytes()).unwrap();
        assert_eq!((hosts[0].name.as_str(), hosts[0].slots), ("mac-a", Some(1)));
        let ips: Vec<String> = hosts[0].addresses.iter().map(IpAddr::to_string).collect();
        assert_eq!(ips, ["10.0.0.1", "fe80::1"]);
        let object =
            |backend: &str| format!(r#"{{"backend": "{backend}", "envs": ["A=1"], "hosts": {ring}}}"#);
        assert_eq!(from_file("x.json", object("ring").as_bytes()).unwrap(), hosts);
        // Where rank 0 is met is not where data goes.
        let jaccl = ring.replace("%en5\"]", "%en5\"], \"rdma\": [null, \"rdma_en5\"]");
        for text in [jaccl, object("jaccl")] {
            let met = from_file("x.json", text.as_bytes()).unwrap();
            assert_eq!(met[0], Host { slots: Some(1), ..Host::named("mac-a") }, "{text}");
        }
        let twice = br#"[{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "a", "ips": ["10.0.0.1", "10.0.0.2"]}]"#;
        let twice = from_file("x.json", twice).unwrap();
        assert_eq!((twice.len(), twice[0].slots, twice[0].addresses.len()), (1, Some(2), 2));
        let wrong = from_file("x.json", br#"[{"ssh": "a", "ips": ["garbage"]}]"#).unwrap_err().to_string();
        assert!(
            wrong.starts_with("x.json: `ips` of a: garbage: has `garbage`, which is no IP address"),
            "{wrong}"
        );
        let wrong = from_file("x.json", b"[\n{\"ips\": []}]").unwrap_err().to_string();
        assert!(wrong.starts_with("x.json:2: JSON: missing field `ssh`"), "{wrong}");
        let matrix = from_file("x.json", br#"[[null, "rdma_en5"], ["rdma_en4", null]]"#).unwrap_err();
        assert!(matrix.to_string().contains("names no host"), "{matrix}");
    }

    #[test]
    fn lists() {
        let hosts = from_list("a, b:2,n[1,3-4]:3,a").unwrap();
        let shown: Vec<_> = hosts.iter().map(|h| format!("{}:{:?}", h.name, h.slots)).collect();
        assert_eq!(shown, ["a:Some(2)", "b:Some(2)", "n1:Some(3)", "n3:Some(3)", "n4:Some(3)"]);
    }

    #[test]
    fn what_makes_no_sense_is_named_with_its_line() {
        for (text, words) in [
            ("a\nb slots=x", "hosts:2: b slots=x: has `slots=x`: a whole number is needed"),
            ("a slots", "hosts:1: a slots: has `slots`"),
            ("a:0", "has `a:0`, where no number"),
            ("a:", "has `a:`, where no number"),
            ("-oProxyCommand=x", "is no host name"),
            ("a;reboot", "is no host name"),
            ("n[3-1]", "runs backwards"),
            ("a max_slots=0", "a whole number is needed"),
            ("a nonsense=1", "means nothing here"),
            ("# only\n", "names no host"),
        ] {
            let error = from_file("hosts", text.as_bytes()).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(words), "{text}: {error}");
        }
        assert!(from_list("a,,b").is_err());
    }

    #[test]
    fn slurm_allocations() {
        let vars = |text: &str| -> Variables {
            text.split_whitespace()
                .map(|w| w.split_once('=').unwrap())
                .map(|(k, v)| (k.into(), v.into()))
                .collect()
        };
        assert_eq!(from_slurm(&vars("HOME=x")).unwrap(), None);
        let hosts = from_slurm(&vars("SLURM_JOB_NODELIST=n[08-10],gpu1 SLURM_TASKS_PER_NODE=2(x3),1"))
            .unwrap()
            .unwrap();
        let shown: Vec<_> = hosts.iter().map(|h| (h.name.as_str(), h.slots.unwrap())).collect();
        assert_eq!(shown, [("n08", 2), ("n09", 2), ("n10", 2), ("gpu1", 1)]);
        assert!(from_slurm(&vars("SLURM_JOB_NODELIST=n[08-10] SLURM_TASKS_PER_NODE=2")).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_hosts_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(hosts) = from_file("hosts", &bytes) {
                prop_assert!(!hosts.is_empty());
                prop_assert!(hosts.iter().all(|h| !h.name.is_empty() && !h.name.starts_with('-')));
            }
        }

        #[test]
        fn likely_bytes_are_hosts_or_an_error(text in "[a-c0-3\\[\\],:=# \n\r-]{0,40}") {
            let _ = from_file("hosts", text.as_bytes());
            let _ = from_list(&text);
        }
    }
}
