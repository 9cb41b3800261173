//! What the environment says of the links between ranks.

use super::env::{ADDRESSES, DEVICES, FABRIC, INTERFACES, Variables, addresses};
use crate::error::{Error, Result};
use crate::fabric::mixed::Options;
use crate::fabric::verbs::Devices;

/// The options that these variables ask for. `size`: number of ranks.
///
/// # Errors
/// [`Error::Argument`] for a variable that makes no sense.
pub fn options(vars: &Variables, size: usize) -> Result<Options> {
    let mut options = Options::default();
    let said = |name: &str| vars.get(name).filter(|text| !text.is_empty());
    let of = |name: &str, e: Error| match e {
        Error::Argument { value, problem, remedy, .. } => Error::argument(name, value, problem, remedy),
        other => other,
    };
    if let Some(text) = said(FABRIC) {
        options.choice = text.parse().map_err(|e| of(FABRIC, e))?;
    }
    if let Some(text) = said(INTERFACES) {
        let on = text.split(',').map(|on| on.trim().parse());
        options.tcp.on = on.collect::<Result<_>>().map_err(|e| of(INTERFACES, e))?;
    }
    if let Some(text) = said(ADDRESSES) {
        options.tcp.first = addresses(ADDRESSES, text)?;
    }
    if let Some(text) = said(DEVICES) {
        options.verbs.devices = devices(text, size)?;
    }
    Ok(options)
}

fn devices(text: &str, size: usize) -> Result<Devices> {
    let names = |cell: &str| -> Vec<String> {
        cell.split('+').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
    };
    let rows: Vec<Vec<Vec<String>>> =
        text.split(';').map(|row| row.split(',').map(names).collect()).collect();
    if rows.len() != size || rows.iter().any(|row| row.len() != size) {
        let problem = format!("is no square for {size} ranks");
        return Err(Error::argument(DEVICES, text, problem, "leave it to the launcher, or unset it"));
    }
    Ok(Devices::Matrix(rows))
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::fabric::mixed::Choice;
    use crate::fabric::tcp::On;

    fn read(vars: &[(&str, &str)]) -> Result<Options> {
        let vars = vars.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        options(&vars, 2)
    }

    #[test]
    fn links_as_the_environment_wants_them() {
        let none = read(&[(FABRIC, "")]).unwrap();
        assert_eq!((none.choice, none.tcp.on), (Choice::Auto, vec![]));
        let some = read(&[
            (FABRIC, "verbs:mlx5_0"),
            (INTERFACES, "en5, 10.0.0.0/24"),
            (ADDRESSES, "10.0.0.7, fe80::1%en5"),
            (DEVICES, ",rdma_en2+rdma_en3;rdma_en4,"),
        ]);
        let some = some.unwrap();
        assert_eq!(some.choice, Choice::Verbs(vec!["mlx5_0".into()]));
        assert_eq!(some.tcp.on, [On::Name("en5".into()), On::Subnet("10.0.0.0".parse().unwrap(), 24)]);
        assert_eq!(some.tcp.first, ["10.0.0.7", "fe80::1"].map(|a| a.parse::<IpAddr>().unwrap()));
        let cell = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let matrix =
            vec![vec![cell(&[]), cell(&["rdma_en2", "rdma_en3"])], vec![cell(&["rdma_en4"]), cell(&[])]];
        assert_eq!(some.verbs.devices, Devices::Matrix(matrix));
    }

    #[test]
    fn what_makes_no_sense_names_the_variable() {
        for (name, text) in [
            (FABRIC, "carrier-pigeon"),
            (INTERFACES, "en5,,en6"),
            (INTERFACES, "10.0.0.0/40"),
            (ADDRESSES, "10.0.0.7,"),
            (ADDRESSES, "garbage"),
            (DEVICES, "a,b"),
            (DEVICES, ",a;b,;,"),
            (DEVICES, ",a;b"),
        ] {
            let e = read(&[(name, text)]).err().unwrap_or_else(|| panic!("{name}={text}"));
            assert!(e.exit_code() == 2 && e.to_string().starts_with(name), "{e}");
        }
    }
}
