//! What is started: the program that the user named, and what it looks like.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use fulmen::job::env::{CONTROL, LOCAL_RANK, LOCAL_SIZE, RANK, SIZE};
use fulmen::job::messages::Fingerprint;
use fulmen::{Error, Result};

/// Finds the program as a shell does, then beside this program itself.
///
/// # Errors
/// [`Error::Argument`] when there is none.
pub fn find(name: &OsStr, search: Option<&OsStr>, beside: &Path) -> Result<PathBuf> {
    let shown = name.to_string_lossy();
    if name.as_encoded_bytes().contains(&b'/') {
        let path = std::path::absolute(name).map_err(|e| no(&shown, &e.to_string()))?;
        return match is_program(&path) {
            true => Ok(path),
            false => Err(no(&shown, "is no file that may be executed")),
        };
    }
    let folders = search.map(|s| std::env::split_paths(s).collect::<Vec<_>>()).unwrap_or_default();
    let found =
        folders.into_iter().chain([beside.to_path_buf()]).map(|f| f.join(name)).find(|p| is_program(p));
    let found = found.ok_or_else(|| no(&shown, "is neither in PATH nor beside fulmen-run"))?;
    std::path::absolute(found).map_err(|e| no(&shown, &e.to_string()))
}

fn is_program(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

fn no(name: &str, problem: &str) -> Error {
    Error::argument("PROGRAM", name, problem, "name a program: one in PATH, or with its path (./program)")
}

/// What the file looks like.
///
/// # Errors
/// When it cannot be read.
pub fn fingerprint(path: &Path) -> Result<Fingerprint> {
    let read = File::open(path).and_then(|mut file| Fingerprint::of(&mut file));
    read.map_err(|e| no(&path.display().to_string(), &format!("cannot be read: {e}")))
}

/// Variables that tell a rank its place.
const OWNED: [&str; 6] = [CONTROL, RANK, SIZE, LOCAL_RANK, LOCAL_SIZE, "FULMEN_SHM"];

/// The variables of `-x`: with a value, or with this process's.
///
/// # Errors
/// [`Error::Argument`] for one that is not set here.
pub fn variables(
    words: &[OsString],
    get: impl Fn(&OsStr) -> Option<OsString>,
) -> Result<Vec<(OsString, OsString)>> {
    use std::os::unix::ffi::OsStrExt;
    let pair = |word: &OsString| {
        let bytes = word.as_bytes();
        let shown = word.to_string_lossy().into_owned();
        let (name, value) = match bytes.iter().position(|b| *b == b'=') {
            Some(at) => {
                (OsStr::from_bytes(&bytes[..at]), Some(OsStr::from_bytes(&bytes[at + 1..]).to_os_string()))
            }
            None => (word.as_os_str(), get(word)),
        };
        let wrong = |problem: &str, remedy: &str| Err(Error::argument("-x", &shown, problem, remedy));
        if OWNED.iter().any(|owned| name == *owned) {
            return wrong("is set for each rank by fulmen-run itself", "leave it away");
        }
        if name.is_empty() || name.as_bytes().iter().any(|b| b.is_ascii_whitespace() || b.is_ascii_control())
        {
            return wrong("is no name of a variable", "write VAR or VAR=VALUE, without blanks in VAR");
        }
        let value = value.ok_or_else(|| {
            Error::argument("-x", &shown, "is not set here", format!("write -x {shown}=VALUE, or set it"))
        })?;
        Ok((name.to_os_string(), value))
    };
    words.iter().map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        let folder = tempfile::tempdir().unwrap();
        let make = |name: &str, mode: u32| {
            let path = folder.path().join(name);
            std::fs::write(&path, "#!/bin/sh\n").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        let (plain, beside) = (make("plain", 0o644), make("tool", 0o755));
        let find = |name: &str, search: &str| find(OsStr::new(name), Some(OsStr::new(search)), folder.path());
        assert!(find("sh", "/nonexistent:/bin").unwrap().starts_with("/bin"));
        assert_eq!(find("tool", "/nonexistent").unwrap(), beside);
        assert_eq!(find(beside.to_str().unwrap(), "").unwrap(), beside);
        for (name, words) in [
            ("no-such-tool", "neither in PATH"),
            (plain.to_str().unwrap(), "may be executed"),
            ("plain", "neither"),
        ] {
            let error = find(name, "/bin").unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains(words), "{error}");
        }
        assert_eq!(fingerprint(&beside).unwrap().len, 10);
    }

    #[test]
    fn variables_by_value_and_by_name() {
        let get = |name: &OsStr| (name == "HERE").then(|| "1".into());
        let vars = |words: &[&str]| variables(&words.iter().map(|w| w.into()).collect::<Vec<_>>(), get);
        assert_eq!(
            vars(&["A=b=c", "HERE", "E="]).unwrap(),
            [("A".into(), "b=c".into()), ("HERE".into(), "1".into()), ("E".into(), "".into())]
        );
        assert!(vars(&["GONE"]).unwrap_err().to_string().contains("-x: GONE: is not set here"));
        assert!(vars(&["=x"]).is_err() && vars(&["FULMEN_RANK=0"]).is_err());
    }
}
