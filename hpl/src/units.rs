//! Numbers as people read them.

/// Bytes in binary units: `1.94 GiB`, `60.9 GiB`, `243.6 TiB`.
pub fn bytes(bytes: u128) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = match value {
        _ if unit == 0 => 0,
        v if v < 10.0 => 2,
        _ => 1,
    };
    format!("{value:.digits$} {}", UNITS[unit])
}

/// A rate given in Gflop/s: `9.74 Gflop/s`, `153 Gflop/s`, `1.21 Tflop/s`.
pub fn rate(gflops: f64) -> String {
    match gflops {
        g if g >= 1e6 => format!("{:.2} Pflop/s", g / 1e6),
        g if g >= 1e3 => format!("{:.2} Tflop/s", g / 1e3),
        g if g >= 100.0 => format!("{g:.0} Gflop/s"),
        g if g >= 10.0 => format!("{g:.1} Gflop/s"),
        g => format!("{g:.2} Gflop/s"),
    }
}

/// A duration: `0.4 s`, `20 s`, `3 min`, `2.5 h`, `4 days`.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 10.0 => format!("{s:.1} s"),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s if s < 63_072_000.0 => format!("{:.0} days", s / 86_400.0),
        s => format!("{:.3e} years", s / 31_557_600.0),
    }
}

/// A number with its noun: `1 rank`, `2 ranks`.
pub fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_read_them() {
        assert_eq!(bytes(8 * 5_786_112 * 5_786_112), "243.6 TiB");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(2_080_899_072), "1.94 GiB");
        assert_eq!(rate(153.2), "153 Gflop/s");
        assert_eq!(rate(1_102_000_000.0), "1102.00 Pflop/s");
        assert_eq!(duration(0.0), "0.0 s");
        assert_eq!(duration(19.7), "20 s");
        assert_eq!(duration(8000.0), "2.2 h");
        assert_eq!(count(1, "rank") + " x " + &count(2, "thread"), "1 rank x 2 threads");
    }
}
