//! Our structs and constants against the system's own header, by a small C program.

use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::process::Command;

use super::abi::*;

/// (C expression, our value)
type Row = (String, usize);

macro_rules! rows {
    ($rows:ident, $ours:ty, $theirs:literal, size, { $($field:ident = $c:literal),* $(,)? }) => {
        $rows.push((format!("sizeof({})", $theirs), size_of::<$ours>()));
        rows!($rows, $ours, $theirs, part, { $($field = $c),* });
    };
    ($rows:ident, $ours:ty, $theirs:literal, part, { $($field:ident = $c:literal),* $(,)? }) => {
        $($rows.push((format!("offsetof({}, {})", $theirs, $c), offset_of!($ours, $field)));)*
    };
}

fn rows() -> Vec<Row> {
    let mut r: Vec<Row> = Vec::new();
    rows!(r, IbvDevice, "struct ibv_device", part, { node_type = "node_type", transport_type = "transport_type", name = "name" });
    rows!(r, IbvContextOps, "struct ibv_context_ops", size, { poll_cq = "poll_cq", post_send = "post_send", post_recv = "post_recv" });
    rows!(r, IbvContext, "struct ibv_context", part, { device = "device", ops = "ops", cmd_fd = "cmd_fd", async_fd = "async_fd", num_comp_vectors = "num_comp_vectors" });
    rows!(r, IbvPd, "struct ibv_pd", part, { context = "context" });
    rows!(r, IbvCq, "struct ibv_cq", part, { context = "context" });
    rows!(r, IbvQp, "struct ibv_qp", part, {
        context = "context", pd = "pd", send_cq = "send_cq", recv_cq = "recv_cq", srq = "srq", handle = "handle",
        qp_num = "qp_num", state = "state", qp_type = "qp_type",
    });
    rows!(r, IbvMr, "struct ibv_mr", size, { addr = "addr", length = "length", handle = "handle", lkey = "lkey", rkey = "rkey" });
    rows!(r, IbvGid, "union ibv_gid", size, { raw = "raw" });
    rows!(r, IbvDeviceAttr, "struct ibv_device_attr", size, {
        node_guid = "node_guid", max_mr_size = "max_mr_size", vendor_id = "vendor_id", max_qp = "max_qp",
        max_qp_wr = "max_qp_wr", device_cap_flags = "device_cap_flags", max_sge = "max_sge", max_cq = "max_cq",
        max_cqe = "max_cqe", max_mr = "max_mr", max_pd = "max_pd", max_qp_rd_atom = "max_qp_rd_atom",
        max_pkeys = "max_pkeys", phys_port_cnt = "phys_port_cnt",
    });
    rows!(r, IbvPortAttr, "struct ibv_port_attr", size, {
        state = "state", active_mtu = "active_mtu", gid_tbl_len = "gid_tbl_len", max_msg_sz = "max_msg_sz", lid = "lid",
        active_width = "active_width", active_speed = "active_speed", link_layer = "link_layer",
    });
    rows!(r, IbvQpCap, "struct ibv_qp_cap", size, { max_recv_wr = "max_recv_wr", max_inline_data = "max_inline_data" });
    rows!(r, IbvQpInitAttr, "struct ibv_qp_init_attr", size, {
        send_cq = "send_cq", recv_cq = "recv_cq", srq = "srq", cap = "cap", qp_type = "qp_type", sq_sig_all = "sq_sig_all",
    });
    rows!(r, IbvAhAttr, "struct ibv_ah_attr", size, {
        dgid = "grh.dgid", flow_label = "grh.flow_label", sgid_index = "grh.sgid_index", hop_limit = "grh.hop_limit",
        traffic_class = "grh.traffic_class", dlid = "dlid", sl = "sl", src_path_bits = "src_path_bits",
        static_rate = "static_rate", is_global = "is_global", port_num = "port_num",
    });
    rows!(r, IbvQpAttr, "struct ibv_qp_attr", size, {
        qp_state = "qp_state", path_mtu = "path_mtu", rq_psn = "rq_psn", sq_psn = "sq_psn", dest_qp_num = "dest_qp_num",
        qp_access_flags = "qp_access_flags", cap = "cap", ah_attr = "ah_attr", pkey_index = "pkey_index",
        max_rd_atomic = "max_rd_atomic", max_dest_rd_atomic = "max_dest_rd_atomic", min_rnr_timer = "min_rnr_timer",
        port_num = "port_num", timeout = "timeout", retry_cnt = "retry_cnt", rnr_retry = "rnr_retry", rate_limit = "rate_limit",
    });
    rows!(r, IbvSge, "struct ibv_sge", size, { addr = "addr", length = "length", lkey = "lkey" });
    rows!(r, IbvSendWr, "struct ibv_send_wr", size, {
        next = "next", sg_list = "sg_list", num_sge = "num_sge", opcode = "opcode", send_flags = "send_flags",
        imm_data = "imm_data", remote_addr = "wr.rdma.remote_addr", rkey = "wr.rdma.rkey",
    });
    rows!(r, IbvRecvWr, "struct ibv_recv_wr", size, { next = "next", sg_list = "sg_list", num_sge = "num_sge" });
    rows!(r, IbvWc, "struct ibv_wc", size, {
        status = "status", opcode = "opcode", vendor_err = "vendor_err", byte_len = "byte_len", imm_data = "imm_data",
        qp_num = "qp_num", wc_flags = "wc_flags", dlid_path_bits = "dlid_path_bits",
    });
    let constants = [
        ("IBV_PORT_ACTIVE", PORT_ACTIVE),
        ("IBV_QPT_RC", QPT_RC),
        ("IBV_QPT_UC", QPT_UC),
        ("IBV_QPS_INIT", QPS_INIT),
        ("IBV_QPS_RTR", QPS_RTR),
        ("IBV_QPS_RTS", QPS_RTS),
        ("IBV_WR_RDMA_WRITE_WITH_IMM", WR_RDMA_WRITE_WITH_IMM),
        ("IBV_WR_SEND", WR_SEND),
        ("IBV_SEND_SIGNALED", SEND_SIGNALED as i32),
        ("IBV_ACCESS_LOCAL_WRITE", ACCESS_LOCAL_WRITE),
        ("IBV_ACCESS_REMOTE_WRITE", ACCESS_REMOTE_WRITE),
        ("IBV_ACCESS_REMOTE_READ", ACCESS_REMOTE_READ),
        ("IBV_QP_STATE", QP_STATE),
        ("IBV_QP_ACCESS_FLAGS", QP_ACCESS_FLAGS),
        ("IBV_QP_PKEY_INDEX", QP_PKEY_INDEX),
        ("IBV_QP_PORT", QP_PORT),
        ("IBV_QP_AV", QP_AV),
        ("IBV_QP_PATH_MTU", QP_PATH_MTU),
        ("IBV_QP_TIMEOUT", QP_TIMEOUT),
        ("IBV_QP_RETRY_CNT", QP_RETRY_CNT),
        ("IBV_QP_RNR_RETRY", QP_RNR_RETRY),
        ("IBV_QP_RQ_PSN", QP_RQ_PSN),
        ("IBV_QP_MAX_QP_RD_ATOMIC", QP_MAX_QP_RD_ATOMIC),
        ("IBV_QP_MIN_RNR_TIMER", QP_MIN_RNR_TIMER),
        ("IBV_QP_SQ_PSN", QP_SQ_PSN),
        ("IBV_QP_MAX_DEST_RD_ATOMIC", QP_MAX_DEST_RD_ATOMIC),
        ("IBV_QP_CAP", QP_CAP),
        ("IBV_QP_DEST_QPN", QP_DEST_QPN),
        ("IBV_WC_LOC_LEN_ERR", WC_LOC_LEN_ERR),
        ("IBV_WC_RETRY_EXC_ERR", WC_RETRY_EXC_ERR),
        ("IBV_WC_RNR_RETRY_EXC_ERR", WC_RNR_RETRY_EXC_ERR),
    ];
    r.extend(constants.map(|(name, value)| (format!("(size_t)({name})"), value as usize)));
    r
}

#[test]
fn layouts_and_constants_are_the_headers() {
    let rows = rows();
    let mut source = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\nint main(void) {\n",
    );
    for (expression, _) in &rows {
        writeln!(source, "  printf(\"%zu\\n\", (size_t)({expression}));").unwrap();
    }
    source += "  return 0;\n}\n";
    let folder = tempfile::tempdir().unwrap();
    let (file, program) = (folder.path().join("layout.c"), folder.path().join("layout"));
    std::fs::write(&file, source).unwrap();
    let has = |text: &str| {
        let probe = folder.path().join("probe.c");
        std::fs::write(&probe, text).unwrap();
        Command::new("cc").arg("-fsyntax-only").arg(&probe).output().is_ok_and(|o| o.status.success())
    };
    if !has("#include <stddef.h>\n") {
        return println!("skipped: no C compiler `cc`");
    }
    if !has("#include <infiniband/verbs.h>\n") {
        return println!("skipped: no infiniband/verbs.h (Debian: libibverbs-dev)");
    }
    let compiled = Command::new("cc").arg(&file).arg("-o").arg(&program).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let said = Command::new(&program).output().unwrap();
    let theirs: Vec<usize> =
        String::from_utf8(said.stdout).unwrap().lines().map(|l| l.parse().unwrap()).collect();
    assert_eq!(theirs.len(), rows.len());
    for ((expression, ours), theirs) in rows.iter().zip(theirs) {
        assert_eq!(*ours, theirs, "{expression}");
    }
    println!("{} sizes, offsets and constants agree with infiniband/verbs.h", rows.len());
}
