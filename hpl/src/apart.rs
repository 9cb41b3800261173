//! Reports destroy nothing that is needed: neither what is read nor each other, whatever links lead there.

use std::path::Path;

use fulmen::Error;

use crate::params::Sink;
use crate::report::{self, file};
use crate::settings::Settings;

fn file_of(sink: &Sink) -> Option<&Path> {
    if let Sink::File(path) = sink { Some(path) } else { None }
}

/// No report may replace what is read, or the other one.
///
/// # Errors
/// [`Error::Argument`].
pub fn reports(file: Option<&Path>, sink: &Sink, json: Option<&Sink>) -> Result<(), Error> {
    let (report, json) = (file_of(sink), json.and_then(file_of));
    let refused = |flag: &str, path: &Path, problem: &str| {
        Err(Error::argument(flag, path.display(), problem, "nothing was run; name another file"))
    };
    for (flag, output) in [("output file", report), ("--json", json)] {
        if let (Some(output), Some(file)) = (output, file)
            && file::replaces(output, file)
        {
            return refused(flag, output, "the HPL.dat that is run would be replaced by the report");
        }
    }
    match (report, json) {
        (Some(report), Some(json)) if file::replaces(report, json) || file::replaces(json, report) => {
            refused("--json", json, "the HPL.out report goes there")
        }
        _ => Ok(()),
    }
}

/// Nor may a file of the bundle.
///
/// # Errors
/// [`Error::Argument`].
pub fn bundle(settings: &Settings, folder: &Path) -> Result<(), Error> {
    let others = [
        (settings.file.as_deref(), "the HPL.dat that is run"),
        (file_of(&settings.input.sink), "the HPL.out report"),
        (settings.json.as_ref().and_then(file_of), "the JSON report"),
    ];
    for name in report::bundle::names(&settings.input, folder) {
        let other = others.iter().find(|(path, _)| {
            path.is_some_and(|path| file::replaces(&name, path) || file::replaces(path, &name))
        });
        if let Some((_, what)) = other {
            let problem = format!("{} would replace {what}", name.display());
            return Err(Error::argument(
                "--bundle",
                folder.display(),
                problem,
                "nothing was run; name another folder",
            ));
        }
    }
    Ok(())
}
