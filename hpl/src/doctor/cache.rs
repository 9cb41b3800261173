//! What devices were found to be by trying, kept in the user's cache: it changes with the system's build alone, and trying
//! costs Apple's driver resources.

use std::path::{Path, PathBuf};

use fulmen::fabric::verbs::LIBRARY_VARIABLE;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::facts::System;

/// Where something that was found holds.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Key {
    fulmen: String,
    os: String,
    version: String,
    build: String,
    /// [`LIBRARY_VARIABLE`], if set.
    library: Option<String>,
    /// The device, or both of a pair.
    device: String,
}

impl Key {
    /// Of a device on this system.
    pub fn of(system: &System, device: &str) -> Key {
        Key {
            fulmen: env!("CARGO_PKG_VERSION").into(),
            os: system.os.clone(),
            version: system.version.clone(),
            build: system.build.clone(),
            library: std::env::var(LIBRARY_VARIABLE).ok(),
            device: device.into(),
        }
    }

    /// Of two devices on two systems.
    pub fn of_pair(here: (&System, &str), there: (&System, &str)) -> Key {
        let key = Key::of(here.0, &format!("{}-{}", here.1, there.1));
        Key { build: format!("{} {}", key.build, there.0.build), ..key }
    }
}

/// `~/Library/Caches/fulmen/probe` on a Mac, `~/.cache/fulmen/probe` elsewhere.
pub fn folder(system: &System) -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let below = if system.is_macos() { "Library/Caches" } else { ".cache" };
    let folder = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(below)))?;
    folder.is_absolute().then(|| folder.join("fulmen/probe"))
}

/// One file each; a name that is no file name is not kept.
fn file(folder: &Path, device: &str) -> Option<PathBuf> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    (!device.is_empty() && device.chars().all(is_plain)).then(|| folder.join(format!("{device}.json")))
}

/// What was kept, if it holds there.
pub fn recall<T: DeserializeOwned>(folder: &Path, wanted: &Key) -> Option<T> {
    let text = std::fs::read_to_string(file(folder, &wanted.device)?).ok()?;
    let (key, found): (Key, T) = serde_json::from_str(&text).ok()?;
    (key == *wanted).then_some(found)
}

/// Keeps it: whole or not at all, for a half-written file is of no use, and is not read.
pub fn keep<T: Serialize>(folder: &Path, key: &Key, found: &T) {
    let Some(path) = file(folder, &key.device) else { return };
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

    #[test]
    fn what_is_kept_holds_for_its_build_alone() {
        let folder = tempfile::tempdir().unwrap();
        let system = System {
            os: "macos".into(),
            version: "26.3".into(),
            build: "25D125".into(),
            ..System::default()
        };
        let of = |system: &System| Key::of(system, "rdma_en5");
        let recall = |key: &Key| recall::<u64>(folder.path(), key);
        assert_eq!(recall(&of(&system)), None);
        keep(folder.path(), &of(&system), &7u64);
        assert_eq!(recall(&of(&system)), Some(7));
        let next = System { build: "25D200".into(), ..system.clone() };
        assert_eq!(recall(&of(&next)), None);
        keep(folder.path(), &Key::of(&system, "../x"), &8u64);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        std::fs::write(folder.path().join("rdma_en5.json"), "{").unwrap();
        assert_eq!(recall(&of(&system)), None);
    }

    #[test]
    fn a_pair_holds_for_both_builds() {
        let folder = tempfile::tempdir().unwrap();
        let system = |build: &str| System { build: build.into(), ..System::default() };
        let of = |a: &str, b: &str| Key::of_pair((&system(a), "rdma_en5"), (&system(b), "rdma_en4"));
        keep(folder.path(), &of("A", "A"), &7u64);
        assert_eq!(recall::<u64>(folder.path(), &of("A", "A")), Some(7));
        assert_eq!(recall::<u64>(folder.path(), &of("A", "B")), None);
        assert_eq!(recall::<u64>(folder.path(), &of("B", "A")), None);
    }
}
