//! What devices were found to be by trying, kept in the user's cache: it changes with the system's build alone, and trying
//! costs Apple's driver resources.

use std::path::{Path, PathBuf};

use fulmen::fabric::verbs::LIBRARY_VARIABLE;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::facts::{Facts, System};

/// Where something that was found holds.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Key {
    fulmen: String,
    /// [`LIBRARY_VARIABLE`], if set.
    library: Option<String>,
    /// The device, or both of a pair.
    ends: Vec<End>,
}

/// A device, and all that it depends on. Hosts that share a home share what is kept.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct End {
    host: String,
    model: String,
    os: String,
    version: String,
    build: String,
    device: String,
}

impl End {
    fn of(facts: &Facts, device: &str) -> End {
        let System { os, version, build, model, .. } = facts.system.clone();
        End { host: facts.host.clone(), model, os, version, build, device: device.into() }
    }
}

impl Key {
    /// Of a device of this host.
    pub fn of(facts: &Facts, device: &str) -> Key {
        Key {
            fulmen: env!("CARGO_PKG_VERSION").into(),
            library: std::env::var(LIBRARY_VARIABLE).ok(),
            ends: vec![End::of(facts, device)],
        }
    }

    /// Of two devices of two hosts.
    pub fn of_pair(here: (&Facts, &str), there: (&Facts, &str)) -> Key {
        let ends = [here, there].map(|(facts, device)| End::of(facts, device));
        Key { ends: ends.into(), ..Key::of(here.0, here.1) }
    }

    /// The name of its file.
    fn name(&self) -> String {
        let parts: Vec<String> = self.ends.iter().map(|end| format!("{}-{}", end.host, end.device)).collect();
        let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
        parts.join("-").chars().map(plain).chain(".json".chars()).collect()
    }
}

/// `~/Library/Caches/fulmen/probe` on a Mac, `~/.cache/fulmen/probe` elsewhere.
pub fn folder(system: &System) -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let below = if system.is_macos() { "Library/Caches" } else { ".cache" };
    let folder = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(below)))?;
    folder.is_absolute().then(|| folder.join("fulmen/probe"))
}

/// What was kept, if it holds there.
pub fn recall<T: DeserializeOwned>(folder: &Path, wanted: &Key) -> Option<T> {
    let text = std::fs::read_to_string(folder.join(wanted.name())).ok()?;
    let (key, found): (Key, T) = serde_json::from_str(&text).ok()?;
    (key == *wanted).then_some(found)
}

/// Keeps it: whole or not at all, for a half-written file is of no use, and is not read.
pub fn keep<T: Serialize>(folder: &Path, key: &Key, found: &T) {
    let path = folder.join(key.name());
    let Ok(text) = serde_json::to_string_pretty(&(key, found)) else { return };
    let part = path.with_extension(std::process::id().to_string());
    // Without a cache the devices are tried again next time.
    let _ = std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&part, text))
        .and_then(|()| std::fs::rename(&part, &path));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mac(host: &str, model: &str, build: &str) -> Facts {
        let system =
            System { os: "macos".into(), model: model.into(), build: build.into(), ..System::default() };
        Facts { host: host.into(), system, ..Facts::default() }
    }

    #[test]
    fn what_is_kept_holds_for_its_host_and_build_alone() {
        let folder = tempfile::tempdir().unwrap();
        let of = |host, model, build| Key::of(&mac(host, model, build), "rdma_en5");
        let recall = |key: &Key| recall::<u64>(folder.path(), key);
        let mine = of("a.local", "Mac16,11", "25D125");
        assert_eq!(recall(&mine), None);
        keep(folder.path(), &mine, &7u64);
        assert_eq!(recall(&mine), Some(7));
        for other in [
            of("b", "Mac16,11", "25D125"),
            of("a.local", "Mac16,9", "25D125"),
            of("a.local", "Mac16,11", "25D200"),
        ] {
            assert_eq!(recall(&other), None, "{other:?}");
        }
        // Another host's, in the same home, leaves it alone.
        keep(folder.path(), &of("b", "Mac16,11", "25D125"), &8u64);
        assert_eq!(recall(&mine), Some(7));
        // No name leads out of the folder.
        keep(folder.path(), &Key::of(&mac("../..", "", ""), "../x"), &9u64);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
        std::fs::write(folder.path().join(mine.name()), "{").unwrap();
        assert_eq!(recall(&mine), None);
    }

    #[test]
    fn a_pair_holds_for_both_hosts_and_builds() {
        let folder = tempfile::tempdir().unwrap();
        let of = |a: (&str, &str), b: (&str, &str)| {
            let [a, b] = [a, b].map(|(host, build)| mac(host, "", build));
            Key::of_pair((&a, "mlx5_0"), (&b, "mlx5_0"))
        };
        let mine = of(("a", "A"), ("b", "B"));
        keep(folder.path(), &mine, &7u64);
        assert_eq!(recall::<u64>(folder.path(), &mine), Some(7));
        for other in [of(("a", "A"), ("b", "A")), of(("a", "B"), ("b", "B")), of(("a", "A"), ("c", "B"))] {
            assert_eq!(recall::<u64>(folder.path(), &other), None, "{other:?}");
        }
    }
}
