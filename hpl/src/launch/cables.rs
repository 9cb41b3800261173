//! Which RDMA devices lead from rank to rank, where the hostfile is one of `mlx.launch` that says so.

use crate::doctor::mlx::{Cables, Host};

/// FULMEN_DEVICES for ranks on these hosts; `None` when the file names no device between them.
pub fn by_rank(cables: &Cables, hosts: &[&str]) -> Option<String> {
    let find = |name: &str| cables.hosts.iter().position(|h: &Host| h.name == name);
    let at: Vec<Option<usize>> = hosts.iter().map(|name| find(name)).collect();
    let devices = |from: Option<usize>, to: Option<usize>| -> String {
        let row = from.and_then(|from| cables.hosts.get(from)).map(|host| &host.devices);
        row.zip(to).and_then(|(row, to)| row.get(to)).map(|names| names.join("+")).unwrap_or_default()
    };
    let row = |from: &Option<usize>| at.iter().map(|to| devices(*from, *to)).collect::<Vec<_>>().join(",");
    let text = at.iter().map(row).collect::<Vec<_>>().join(";");
    (!text.trim_matches([',', ';']).is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_matrix_becomes_the_ranks() {
        let text = r#"[{"ssh": "a", "ips": [], "rdma": [null, "rdma_en5", ["rdma_en2", "rdma_en3"]]},
                       {"ssh": "b", "ips": [], "rdma": ["rdma_en4", null, null]},
                       {"ssh": "c", "ips": [], "rdma": [["rdma_en2", "rdma_en3"], null, null]}]"#;
        let cables = Cables::parse(text, "hosts.json").unwrap();
        assert_eq!(
            by_rank(&cables, &["a", "b", "c"]).unwrap(),
            ",rdma_en5,rdma_en2+rdma_en3;rdma_en4,,;rdma_en2+rdma_en3,,"
        );
        // Two ranks on a, none on b.
        assert_eq!(
            by_rank(&cables, &["c", "a", "a"]).unwrap(),
            ",rdma_en2+rdma_en3,rdma_en2+rdma_en3;rdma_en2+rdma_en3,,;rdma_en2+rdma_en3,,"
        );
        assert_eq!(by_rank(&cables, &["b", "c", "b"]), None);
        assert_eq!(by_rank(&cables, &["x", "y"]), None);
    }
}
