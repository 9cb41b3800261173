//! The structures of `abi` against the system's header, where a C compiler and libibverbs-dev are installed.

#![cfg(target_os = "linux")]

use std::mem::offset_of;
use std::process::Command;

use fulmen_emu_verbs::abi::*;

macro_rules! table {
    ($($rust:ident $c:literal { $($field:ident $($cfield:literal)?),* })*) => {
        vec![$((format!("sizeof(struct {})", $c), size_of::<$rust>()),
            $((format!("offsetof(struct {}, {})", $c, [$($cfield,)? stringify!($field)][0]), offset_of!($rust, $field)),)*)*]
    };
}

fn expected() -> Vec<(String, usize)> {
    table! {
        Device "ibv_device" { node_type, transport_type, name, dev_name, dev_path, ibdev_path }
        Context "ibv_context" { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
        Ops "ibv_context_ops" { poll_cq, req_notify_cq, post_send, post_recv }
        Pd "ibv_pd" { context, handle }
        Mr "ibv_mr" { context, pd, addr, length, handle, lkey, rkey }
        Cq "ibv_cq" { context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed, async_events_completed }
        Qp "ibv_qp" { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex, cond, events_completed }
        DeviceAttr "ibv_device_attr" {
            node_guid, max_mr_size, page_size_cap, hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge, max_cq, max_cqe, max_mr,
            max_pd, atomic_cap, max_ah, max_srq, max_srq_sge, max_pkeys, phys_port_cnt }
        PortAttr "ibv_port_attr" {
            state, max_mtu, active_mtu, gid_tbl_len, max_msg_sz, pkey_tbl_len, lid, sm_lid, lmc, active_width, active_speed,
            phys_state, link_layer, flags, port_cap_flags2 }
        GlobalRoute "ibv_global_route" { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        AhAttr "ibv_ah_attr" { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        QpCap "ibv_qp_cap" { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        QpInitAttr "ibv_qp_init_attr" { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        QpAttr "ibv_qp_attr" {
            qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap, ah_attr,
            alt_ah_attr, pkey_index, en_sqd_async_notify, max_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry,
            alt_timeout, rate_limit }
        Sge "ibv_sge" { addr, length, lkey }
        SendWr "ibv_send_wr" { wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, remote_addr "wr.rdma.remote_addr", rkey "wr.rdma.rkey" }
        RecvWr "ibv_recv_wr" { wr_id, next, sg_list, num_sge }
        Wc "ibv_wc" { wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits }
    }
}

fn constants() -> Vec<(String, usize)> {
    macro_rules! same {
        ($($rust:ident $c:literal)*) => { vec![$(($c.to_owned(), $rust as usize)),*] };
    }
    same! {
        NODE_CA "IBV_NODE_CA" PORT_DOWN "IBV_PORT_DOWN" PORT_ACTIVE "IBV_PORT_ACTIVE" MTU_4096 "IBV_MTU_4096"
        QPT_RC "IBV_QPT_RC" QPT_UC "IBV_QPT_UC" QPS_INIT "IBV_QPS_INIT" QPS_RTR "IBV_QPS_RTR" QPS_RTS "IBV_QPS_RTS" QPS_ERR "IBV_QPS_ERR"
        QP_STATE "IBV_QP_STATE" QP_ACCESS_FLAGS "IBV_QP_ACCESS_FLAGS" QP_PKEY_INDEX "IBV_QP_PKEY_INDEX" QP_PORT "IBV_QP_PORT" QP_AV "IBV_QP_AV"
        QP_PATH_MTU "IBV_QP_PATH_MTU" QP_TIMEOUT "IBV_QP_TIMEOUT" QP_RETRY_CNT "IBV_QP_RETRY_CNT" QP_RNR_RETRY "IBV_QP_RNR_RETRY"
        QP_RQ_PSN "IBV_QP_RQ_PSN" QP_MAX_QP_RD_ATOMIC "IBV_QP_MAX_QP_RD_ATOMIC" QP_MIN_RNR_TIMER "IBV_QP_MIN_RNR_TIMER"
        QP_SQ_PSN "IBV_QP_SQ_PSN" QP_MAX_DEST_RD_ATOMIC "IBV_QP_MAX_DEST_RD_ATOMIC" QP_DEST_QPN "IBV_QP_DEST_QPN"
        ACCESS_LOCAL_WRITE "IBV_ACCESS_LOCAL_WRITE" ACCESS_REMOTE_WRITE "IBV_ACCESS_REMOTE_WRITE" ACCESS_REMOTE_READ "IBV_ACCESS_REMOTE_READ"
        WR_RDMA_WRITE "IBV_WR_RDMA_WRITE" WR_RDMA_WRITE_WITH_IMM "IBV_WR_RDMA_WRITE_WITH_IMM" WR_SEND "IBV_WR_SEND"
        WR_SEND_WITH_IMM "IBV_WR_SEND_WITH_IMM" SEND_SIGNALED "IBV_SEND_SIGNALED" SEND_INLINE "IBV_SEND_INLINE"
        WC_LOC_LEN_ERR "IBV_WC_LOC_LEN_ERR" WC_LOC_QP_OP_ERR "IBV_WC_LOC_QP_OP_ERR" WC_LOC_PROT_ERR "IBV_WC_LOC_PROT_ERR"
        WC_WR_FLUSH_ERR "IBV_WC_WR_FLUSH_ERR" WC_REM_ACCESS_ERR "IBV_WC_REM_ACCESS_ERR" WC_RETRY_EXC_ERR "IBV_WC_RETRY_EXC_ERR"
        WC_OP_SEND "IBV_WC_SEND" WC_OP_RDMA_WRITE "IBV_WC_RDMA_WRITE" WC_OP_RECV "IBV_WC_RECV"
        WC_OP_RECV_RDMA_WITH_IMM "IBV_WC_RECV_RDMA_WITH_IMM" WC_WITH_IMM "IBV_WC_WITH_IMM"
    }
}

#[test]
fn structures_and_numbers_are_the_headers() {
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("layout.c"), folder.path().join("layout"));
    let expected: Vec<_> = expected().into_iter().chain(constants()).collect();
    let lines: String =
        expected.iter().map(|(e, _)| format!("  printf(\"%zu\\n\", (size_t)({e}));\n")).collect();
    let text = format!(
        "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{\n{lines}  return 0;\n}}\n"
    );
    std::fs::write(&source, "#include <infiniband/verbs.h>\n").unwrap();
    let cc = || Command::new("cc");
    match cc().arg("-fsyntax-only").arg(&source).output() {
        Ok(out) if out.status.success() => {}
        _ => {
            eprintln!("skipped: no C compiler, or no libibverbs-dev");
            return;
        }
    }
    std::fs::write(&source, text).unwrap();
    let built = cc().arg(&source).arg("-o").arg(&program).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let out = String::from_utf8(Command::new(&program).output().unwrap().stdout).unwrap();
    let found: Vec<usize> = out.lines().map(|l| l.parse().unwrap()).collect();
    assert_eq!(found.len(), expected.len());
    let wrong: Vec<_> = expected.iter().zip(found).filter(|((_, ours), theirs)| ours != theirs).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    assert!(expected.len() > 150);
}
