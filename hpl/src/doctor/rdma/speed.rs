//! How fast the cables are, found by comparing the two directions of each and the cables with one another.

use super::super::facts::{Facts, Link};
use super::super::finding::{Finding, link_check};
use super::super::network::{SLOW, UNLIKE, rate, usual};

/// All that is recognised, over all hosts.
pub fn judge(all: &[Facts]) -> Vec<Finding> {
    let links = || all.iter().flat_map(|facts| facts.rdma.links.iter().map(move |link| (facts, link)));
    let speed = |link: &Link| link.together.as_ref().map(|t| t.rate).filter(|rate| *rate > 0.0);
    let mut found = Vec::new();
    for (facts, link) in links() {
        let Some(mine) = speed(link) else { continue };
        let is_back = |(there, back): &(&Facts, &Link)| {
            there.host == link.peer && (&back.device, &back.far) == (&link.far, &link.device)
        };
        let back = links().find(is_back).and_then(|(_, back)| speed(back));
        let others = usual(links().filter_map(|(_, l)| speed(l)), true);
        let finding = match (back, others) {
            (Some(back), _) if mine * UNLIKE < back => Finding::warning(
                "asymmetric-link",
                link_check(link),
                format!("{} come here, {} go there", rate(mine), rate(back)),
            )
            .because("one direction runs on fewer lanes or at a lower speed: a bad cable or connector, or a busy host")
            .then("turn the cable round, then take another: does the slow direction change?"),
            (_, Some(others)) if mine < SLOW * others => Finding::warning(
                "slow-link",
                link_check(link),
                format!("{} come here, over other cables {}", rate(mine), rate(others)),
            )
            .because("a cable for a slower standard (Thunderbolt 4 has half), a bad connector, or other traffic on it")
            .then("see what the port has agreed on: `system_profiler SPThunderboltDataType` (macOS), `rdma link show` (Linux)")
            .then("another cable, another port; then measure again"),
            _ => continue,
        };
        found.push(Finding { host: facts.host.clone(), ..finding });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::super::facts::Together;
    use super::*;

    /// Hosts, each with a link to each other one, whose device is named by both.
    fn hosts(rates: &[(&str, &str, f64)]) -> Vec<Facts> {
        let mut all: Vec<Facts> =
            ["a", "b", "c"].map(|h| Facts { host: h.into(), ..Facts::default() }).into();
        for (to, from, rate) in rates {
            let link = Link {
                peer: (*from).into(),
                device: format!("rdma_{to}{from}"),
                far: format!("rdma_{from}{to}"),
                together: Some(Together { rate: *rate, ..Together::default() }),
                ..Link::default()
            };
            all.iter_mut().find(|f| f.host == *to).unwrap().rdma.links.push(link);
        }
        all
    }

    fn told(rates: &[(&str, &str, f64)]) -> Vec<(&'static str, String, String)> {
        judge(&hosts(rates)).into_iter().map(|f| (f.id, f.host, f.check)).collect()
    }

    #[test]
    fn cables_that_are_alike_are_not_blamed() {
        let even = [("a", "b", 7e9), ("b", "a", 6e9), ("a", "c", 7.5e9), ("c", "a", 7e9)];
        assert_eq!(told(&even), []);
        assert_eq!(told(&even[..1]), [], "what is not known is not blamed");
        assert_eq!(told(&[]), []);
    }

    #[test]
    fn slow_ones_are_named_in_their_direction() {
        let slow = [("a", "b", 7e9), ("b", "a", 7e9), ("a", "c", 3e9), ("c", "a", 3e9)];
        let link = |id, host: &str, check: &str| (id, host.to_string(), check.to_string());
        assert_eq!(
            told(&slow),
            [link("slow-link", "a", "rdma_ac to c"), link("slow-link", "c", "rdma_ca to a")]
        );
        let one_way = [("a", "b", 7e9), ("b", "a", 2e9)];
        assert_eq!(told(&one_way), [link("asymmetric-link", "b", "rdma_ba to a")]);
    }
}
