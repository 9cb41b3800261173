//! What a NIC does, through the C ABI: on the emulator, and by the same cases on the kernel's software RoCE in a VM, so that
//! the two are known to agree.

#![cfg(target_os = "linux")]

mod client;

use std::process::Command;

use client::*;
use fulmen_emu_verbs::abi::*;
use fulmen_emu_verbs::{Installed, Profile, World};

const MIB: usize = 1 << 20;
/// In the VM: the real library. Its devices are rxe0 and rxe1.
const REAL: &str = "FULMEN_TEST_REAL_VERBS";

struct Nics {
    verbs: Verbs,
    names: [&'static str; 2],
    /// `None` on real ones.
    world: Option<Installed>,
}

fn nics() -> Nics {
    match std::env::var_os(REAL) {
        Some(path) => Nics { verbs: Verbs::load(path.as_ref()), names: ["rxe0", "rxe1"], world: None },
        None => {
            let world = World::switch(Profile::Nic, 2).install().unwrap();
            Nics { verbs: load(&world), names: ["emu0", "emu1"], world: Some(world) }
        }
    }
}

fn remote(end: &End<'_>, at: usize) -> (u64, u32) {
    // SAFETY: a live region.
    (end.memory as u64 + at as u64, unsafe { (*end.mr).rkey })
}

fn carries(kind: i32) {
    let nics = nics();
    let [a, b] = pair(&nics.verbs, nics.names, kind, 64, MIB);
    for (i, len) in [1u32, 8, 4096, 4097, 65536, MIB as u32].into_iter().enumerate() {
        let n = len as usize;
        a.fill(3 * i as u8);
        b.recv(1, 0, MIB as u32).unwrap();
        a.send(2, 0, len).unwrap();
        let (sent, got) = (a.completions(1)[0], b.completions(1)[0]);
        assert_eq!((sent.wr_id, sent.status, sent.opcode), (2, WC_SUCCESS, WC_OP_SEND));
        assert_eq!((got.wr_id, got.status, got.opcode, got.byte_len), (1, WC_SUCCESS, WC_OP_RECV, len));
        assert!(a.bytes()[..n] == b.bytes()[..n], "SEND of {len}");

        a.fill(3 * i as u8 + 1);
        b.recv(3, 0, 8).unwrap();
        a.write(4, 0, len, remote(&b, MIB - n), Some(0xabcd)).unwrap();
        let (sent, got) = (a.completions(1)[0], b.completions(1)[0]);
        assert_eq!((sent.wr_id, sent.status, sent.opcode), (4, WC_SUCCESS, WC_OP_RDMA_WRITE));
        assert_eq!(
            (got.wr_id, got.status, got.opcode, got.byte_len),
            (3, WC_SUCCESS, WC_OP_RECV_RDMA_WITH_IMM, len)
        );
        assert_eq!((got.imm_data, got.wc_flags & WC_WITH_IMM), (0xabcd, WC_WITH_IMM));
        assert!(a.bytes()[..n] == b.bytes()[MIB - n..], "WRITE with immediate data of {len}");

        // Nobody is told of a plain write; the message after it tells.
        a.fill(3 * i as u8 + 2);
        b.recv(5, 0, 8).unwrap();
        a.write(6, 0, len, remote(&b, MIB - n), None).unwrap();
        a.write(7, 0, 0, remote(&b, 0), Some(1)).unwrap();
        a.completions(2);
        assert_eq!(b.completions(1)[0].byte_len, 0);
        assert!(a.bytes()[..n] == b.bytes()[MIB - n..], "WRITE of {len}");
    }
    a.close();
    b.close();
    if let Some(world) = nics.world {
        let counters = world.counters();
        assert_eq!((counters.qps, counters.mrs, counters.pds, counters.recv_missing), (0, 0, 0, 0));
    }
}

#[test]
fn reliable_connections_carry_sends_and_writes() {
    carries(QPT_RC);
}

#[test]
fn unreliable_connections_carry_sends_and_writes() {
    carries(QPT_UC);
}

#[test]
fn an_unreliable_message_without_a_receive_is_lost_silently() {
    let nics = nics();
    let [a, b] = pair(&nics.verbs, nics.names, QPT_UC, 64, MIB);
    a.send(1, 0, 64).unwrap();
    assert_eq!(a.completions(1)[0].status, WC_SUCCESS);
    b.quiet();
    b.recv(2, 0, 64).unwrap();
    b.quiet();
    a.fill(9);
    a.send(3, 64, 64).unwrap();
    assert_eq!(b.completions(1)[0].wr_id, 2);
    assert_eq!(b.bytes()[..64], a.bytes()[64..128]);
}

#[test]
fn a_reliable_message_waits_for_its_receive() {
    let nics = nics();
    let [a, b] = pair(&nics.verbs, nics.names, QPT_RC, 64, MIB);
    a.fill(7);
    a.send(1, 0, 64).unwrap();
    b.quiet();
    b.recv(2, 0, 64).unwrap();
    assert_eq!((b.completions(1)[0].status, a.completions(1)[0].status), (WC_SUCCESS, WC_SUCCESS));
    assert_eq!(b.bytes()[..64], a.bytes()[..64]);
}

#[test]
fn a_wrong_remote_key_is_refused() {
    let nics = nics();
    for (kind, status, next) in
        [(QPT_RC, WC_REM_ACCESS_ERR, WC_WR_FLUSH_ERR), (QPT_UC, WC_SUCCESS, WC_SUCCESS)]
    {
        let [a, b] = pair(&nics.verbs, nics.names, kind, 64, MIB);
        a.fill(5);
        let (addr, key) = remote(&b, 0);
        a.write(1, 0, 64, (addr, key ^ 0x0010_0000), None).unwrap();
        assert_eq!(a.completions(1)[0].status, status);
        a.write(2, 0, 64, (addr, key), None).unwrap();
        assert_eq!(a.completions(1)[0].status, next);
        // Beyond the end of the region.
        let [c, d] = pair(&nics.verbs, nics.names, kind, 64, MIB);
        c.fill(5);
        c.write(3, 0, 64, remote(&d, MIB - 32), None).unwrap();
        assert_eq!(c.completions(1)[0].status, status);
        assert!(d.bytes().iter().all(|x| *x == 0));
    }
}

#[test]
fn requests_that_ask_for_no_completion_get_none() {
    let nics = nics();
    let [a, b] = pair(&nics.verbs, nics.names, QPT_RC, 64, MIB);
    let plain = [&a, &b].map(|e| e.unsignalled());
    for (me, peer, qp, other) in [(&a, &b, plain[0], plain[1]), (&b, &a, plain[1], plain[0])] {
        me.to_init(qp).unwrap();
        // SAFETY: a live queue pair.
        me.to_rtr(qp, &Address { number: unsafe { (*other).qp_num }, ..peer.address() }).unwrap();
        me.to_rts(qp).unwrap();
    }
    for id in 0..4 {
        b.recv_on(plain[1], id, 0, 64).unwrap();
        a.send_flagged(plain[0], 10 + id, if id == 3 { SEND_SIGNALED } else { 0 }).unwrap();
    }
    assert_eq!(b.completions(4).len(), 4);
    assert_eq!(a.completions(1)[0].wr_id, 13);
}

/// All of the above over rdma-core and a kernel's soft RoCE.
#[test]
fn the_same_in_a_vm() {
    if std::env::var_os(REAL).is_some() {
        return;
    }
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let this = std::env::current_exe().unwrap();
    let out = Command::new(root.join("ci/rdma-vm"))
        .args(["--net", "two", "--seconds", "900", "--file"])
        .arg(format!("{}:/usr/bin/nic", this.display()))
        .args(["--", &format!("{REAL}=libibverbs.so.1 nic --test-threads 1")])
        .output()
        .unwrap();
    let (text, errors) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    if out.status.code() == Some(77) {
        eprintln!("{errors}");
        return;
    }
    assert!(
        out.status.success() && text.contains("test result: ok. 7 passed"),
        "{:?}\n{text}\n{errors}",
        out.status.code()
    );
}
