//! Whose memory the puts of `fabric::verbs` come from, and who touches their bytes: the device alone.
#![cfg(target_os = "linux")]

mod verbs;

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;

use fulmen::Result;
use fulmen::fabric::verbs::{Mode, Options, Service, Verbs};
use fulmen::fabric::{Buf, Fabric, Lane, Memory, mem};
use fulmen_emu_verbs::Profile;

const LARGE: usize = 3 << 20;
/// A put of at most so many bytes travels in a control message, and is copied.
const SMALL: usize = 4000;

/// What the processor may do with memory meanwhile.
fn protect(memory: &Memory, protection: i32) {
    let len = memory.len().next_multiple_of(4096);
    // SAFETY: whole pages that nothing else lies in; who touches them against the protection ends the process, as wanted.
    let rc = unsafe { libc::mprotect(memory.as_ptr().cast(), len, protection) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

fn byte(i: usize) -> u8 {
    (i as u32).wrapping_mul(0x9E37_79B9).to_be_bytes()[0]
}

/// Fills memory of one rank, of which nothing is armed or put.
fn fill(memory: &Memory) {
    // SAFETY: nobody else uses it now.
    let bytes = unsafe { std::slice::from_raw_parts_mut(memory.as_ptr(), memory.len()) };
    bytes.iter_mut().enumerate().for_each(|(i, b)| *b = byte(i));
}

/// Whether memory, of which nothing is under way, holds what [`fill`] wrote elsewhere.
fn is_filled(memory: &Memory) -> bool {
    // SAFETY: nobody writes it now.
    let bytes = unsafe { std::slice::from_raw_parts(memory.as_ptr(), memory.len()) };
    bytes.iter().enumerate().all(|(i, b)| *b == byte(i))
}

/// A large put whose source is forbidden to the processor from put to flush, and whose target from arm to wait.
fn guarded_put(fabric: &dyn Fabric, meanwhile: i32, touch: bool) -> Result<()> {
    let memory = fabric.alloc(LARGE)?;
    if fabric.rank() == 0 {
        fill(&memory);
        protect(&memory, meanwhile);
        let ticket = fabric.put(Lane::PANEL, 1, &memory, 0..LARGE)?;
        fabric.flush(ticket)?;
        protect(&memory, libc::PROT_READ | libc::PROT_WRITE);
        return Ok(());
    }
    protect(&memory, meanwhile);
    let arm = fabric.arm(Lane::PANEL, 0, &memory, 0..LARGE)?;
    if touch {
        // SAFETY: mapped; forbidden, which is what this is about.
        unsafe { memory.as_ptr().add(LARGE / 2).read_volatile() };
    }
    assert_eq!(fabric.wait(Lane::PANEL, 0, arm)?, LARGE);
    protect(&memory, libc::PROT_READ | libc::PROT_WRITE);
    assert!(is_filled(&memory));
    Ok(())
}

/// The child's part: both ranks, over devices that do not care for the pages' protection.
#[test]
fn in_a_child() {
    let Ok(task) = std::env::var("FULMEN_GUARDED") else { return };
    let (profile, way) = match task.split(' ').next() {
        Some("apple") => (Profile::Apple, None),
        Some("rc") => (Profile::Nic, Some((Service::Rc, Mode::Write))),
        _ => (Profile::Nic, Some((Service::Uc, Mode::Write))),
    };
    let world = verbs::mesh(profile, 2, 1).past_protection().install().unwrap();
    let checksums = task.contains("sums");
    // Checksums are made of what lies at both ends: it is read, never written.
    let meanwhile = if checksums { libc::PROT_READ } else { libc::PROT_NONE };
    let options = Options { way, checksums: Some(checksums), ..verbs::options(&world, 2, 1) };
    let results = verbs::run(2, &options, |fabric| guarded_put(&*fabric, meanwhile, task.contains("touch")));
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

/// Whether a process may write its own memory past the protection here.
fn can_pass_protection() -> bool {
    use std::os::unix::fs::FileExt;
    let fabrics = mem::Job::new(1, &mem::Options::default()).unwrap().build();
    let memory = fabrics[0].alloc(4096).unwrap();
    let bytes: Vec<u8> = (0..4096).map(byte).collect();
    protect(&memory, libc::PROT_NONE);
    let file = std::fs::OpenOptions::new().read(true).write(true).open("/proc/self/mem");
    let done = file.and_then(|file| file.write_all_at(&bytes, memory.as_ptr() as u64));
    protect(&memory, libc::PROT_READ | libc::PROT_WRITE);
    done.is_ok() && is_filled(&memory)
}

/// No processor reads or writes a byte of a large put: its pages are forbidden to it while the put is under way, and any touch,
/// by whatever code of this process, ends the process. With checksums bytes are read for them, and nothing writes.
#[test]
fn no_processor_touches_a_large_put() {
    if !can_pass_protection() {
        return println!("skipped: this kernel lets no process write its own memory past the protection");
    }
    let tasks = ["apple", "apple sums", "rc", "uc", "uc sums", "apple touch", "rc touch"];
    for task in tasks {
        let out = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "in_a_child", "--nocapture"])
            .env("FULMEN_GUARDED", task)
            .output()
            .unwrap();
        let said = format!("{task}: {:?}: {}", out.status, String::from_utf8_lossy(&out.stderr));
        // That a touch is found out shows that the guard guards.
        let expected = task.contains("touch").then_some(libc::SIGSEGV);
        assert_eq!(out.status.signal(), expected, "{said}");
        assert!(out.status.success() || expected.is_some(), "{said}");
    }
}

/// All copies are counted: those of small puts, once at either end, and none else.
#[test]
fn small_puts_alone_are_copied() {
    for (profile, checksums) in [(Profile::Apple, None), (Profile::Nic, Some(false))] {
        let world = verbs::mesh(profile, 2, 1).install().unwrap();
        let options = Options { checksums, ..verbs::options(&world, 2, 1) };
        let lens = [1, 700, SMALL, SMALL + 1, 4096, 100_000, LARGE];
        let before = world.counters().bytes;
        let results = verbs::run_verbs(2, &options, |verbs, _| {
            let fabric: &dyn Fabric = &**verbs;
            let mut buf = Buf::<u8>::zeros(fabric, LARGE)?;
            for len in lens {
                if fabric.rank() == 0 {
                    buf.write(0..len).iter_mut().enumerate().for_each(|(i, b)| *b = byte(i + len));
                    buf.put(fabric, Lane::PANEL, 1, 0..len)?;
                    buf.flush(fabric)?;
                } else {
                    buf.arm(fabric, Lane::PANEL, 0, 0..LARGE)?;
                    assert_eq!(buf.wait(fabric, Lane::PANEL, 0)?, 0..len);
                    assert!(buf.read(0..len).iter().enumerate().all(|(i, b)| *b == byte(i + len)));
                }
            }
            Ok(verbs.moved())
        });
        let small: u64 = lens.iter().filter(|len| **len <= SMALL).map(|len| *len as u64).sum();
        let large: u64 = lens.iter().map(|len| *len as u64).sum::<u64>() - small;
        for moved in results {
            let moved = moved.unwrap();
            assert_eq!((moved.copied, moved.carried), (small, large), "{profile:?}");
        }
        // The card carried each byte of the large ones once; beside them proofs and control messages.
        let carried = world.counters().bytes - before;
        assert!((large + small..large + (1 << 20)).contains(&carried), "{carried} bytes carried for {large}");
    }
}

/// Memory of another fabric, adopted, is put and filled in place; what was not adopted is refused.
#[test]
fn adopted_memory_is_put_and_filled_in_place() {
    for profile in [Profile::Apple, Profile::Nic] {
        let world = verbs::mesh(profile, 2, 1).install().unwrap();
        let results = verbs::run_verbs(2, &verbs::options(&world, 2, 1), |verbs: &Arc<Verbs>, control| {
            let whole = control.alloc(LARGE)?;
            let before = verbs.usage().1[0].2;
            verbs.adopt(&whole)?;
            verbs.adopt(&whole)?;
            assert_eq!(verbs.usage().1[0].2, before + 1, "one region more, once");
            // A part of it, as a fabric hands parts out.
            let (at, len) = (64 << 10, LARGE / 2);
            let kept = Arc::clone(&whole);
            // SAFETY: inside the whole, which it keeps, and which is used through this part alone.
            let part = Arc::new(unsafe { Memory::new(whole.as_ptr().add(at), len, Box::new(kept)) });
            if verbs.rank() == 0 {
                fill(&part);
                let ticket = verbs.put(Lane::BULK, 1, &part, 0..len)?;
                verbs.flush(ticket)?;
            } else {
                let arm = verbs.arm(Lane::BULK, 0, &part, 0..len)?;
                assert_eq!(verbs.wait(Lane::BULK, 0, arm)?, len);
                assert!(is_filled(&part));
            }
            assert_eq!(verbs.moved().copied, 0);
            Ok(())
        });
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        let c = world.counters();
        assert_eq!((c.mrs, c.qps, c.pds), (0, 0, 0), "{c:?}");
        let results = verbs::run_verbs(2, &verbs::options(&world, 2, 1), |verbs, control| {
            let foreign = control.alloc(LARGE)?;
            match verbs.rank() {
                0 => verbs.put(Lane::BULK, 1, &foreign, 0..LARGE).map(drop),
                _ => verbs.arm(Lane::BULK, 0, &foreign, 0..LARGE).map(drop),
            }
        });
        let refused = |r: &Result<()>| r.as_ref().is_err_and(|e| e.to_string().contains("another fabric"));
        assert!(results.iter().any(refused), "{results:?}");
    }
}
