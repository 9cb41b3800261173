//! What CPU this is, and the blocks that fit its caches.

use super::Isa;
#[cfg(target_arch = "x86_64")]
use crate::cpuid::Signature;

/// A CPU: its name for reports and its data caches in bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Cpu {
    pub name: String,
    pub l1: usize,
    pub l2: usize,
    pub l3: usize,
}

/// Which operand has a block in L2, while the other passes by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Keep {
    /// A block of A in L2, a strip of B in L1: slivers of A come from L2, MR elements a step.
    A,
    /// A block of B in L2, a sliver of A in L1: strips of B come from L2, NR elements a step, which is a third
    /// of the traffic. Wants room for a sliver of A in L1.
    B,
}

/// Block sizes of the packed loops.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Blocking {
    /// Longest pass over k. Sums are cut by it, so it is one number for all CPUs: their bits agree.
    pub kc: usize,
    /// Whose block is in L2.
    pub keep: Keep,
    /// Bytes of that block.
    pub l2_bytes: usize,
    /// Bytes of B that all threads share (of L3).
    pub b_bytes: usize,
}

impl Blocking {
    /// The table.
    pub(super) fn of(cpu: &Cpu, isa: Isa) -> Self {
        Blocking {
            kc: 384,
            // 48 KiB of L1 are those of Intel's cores since Ice Lake, where a block of B is better (README.md).
            keep: if isa == Isa::Avx512 && cpu.l1 >= 48 << 10 { Keep::B } else { Keep::A },
            // 192 rows of 256 on 1 MiB. More than half of L2 loses: what passes through throws the block out.
            l2_bytes: (cpu.l2 / 8 * 3).clamp(96 << 10, 1 << 20),
            b_bytes: (cpu.l3 / 4 * 3).clamp(4 << 20, 24 << 20),
        }
    }

    /// The passes over k: start and length, nearly equal.
    pub(super) fn passes(&self, k: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let kc = k.div_ceil(k.div_ceil(self.kc).max(1)).next_multiple_of(8).max(8);
        (0..k).step_by(kc).map(move |p| (p, kc.min(k - p)))
    }

    /// Rows of A (columns of B) in a block of L2, a multiple of `unit`, for passes of `k` elements of `size` bytes.
    pub(super) fn block(&self, k: usize, unit: usize, size: usize) -> usize {
        (self.l2_bytes / (k.max(1) * size) / unit).clamp(1, 64) * unit
    }
}

impl Cpu {
    /// This machine's.
    pub(super) fn detect() -> Self {
        let (l1, l2, l3) = caches().unwrap_or((32 << 10, 512 << 10, 8 << 20));
        Cpu { name: name(), l1, l2, l3 }
    }
}

#[cfg(target_os = "linux")]
fn caches() -> Option<(usize, usize, usize)> {
    let mut sizes = [0; 4];
    for index in 0..8 {
        let read = |what: &str| {
            std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{what}")).ok()
        };
        let (Some(level), Some(kind), Some(size)) = (read("level"), read("type"), read("size")) else {
            continue;
        };
        let kib = size.trim().strip_suffix('K').and_then(|s| s.parse::<usize>().ok());
        if let (Ok(level), Some(kib), true) =
            (level.trim().parse::<usize>(), kib, kind.trim() != "Instruction")
            && level < sizes.len()
        {
            sizes[level] = kib << 10;
        }
    }
    (sizes[1] > 0 && sizes[2] > 0).then_some((sizes[1], sizes[2], sizes[3]))
}

/// The performance cores'. The cores of a cluster share its L2, and there is no L3 (the cache in front of the memory
/// is not told): half of L2, shared out, stands for each core's own, half for what the cores work on together.
#[cfg(target_os = "macos")]
fn caches() -> Option<(usize, usize, usize)> {
    use crate::sysctl::number;
    let bytes = |name| number(name).map(|n| n as usize).filter(|&n| n > 0);
    let l1 = bytes(c"hw.perflevel0.l1dcachesize").or_else(|| bytes(c"hw.l1dcachesize"))?;
    let l2 = bytes(c"hw.perflevel0.l2cachesize").or_else(|| bytes(c"hw.l2cachesize"))?;
    match bytes(c"hw.l3cachesize") {
        Some(l3) => Some((l1, l2, l3)),
        None => Some((l1, l2 / 2 / bytes(c"hw.perflevel0.cpusperl2").unwrap_or(1), l2 / 2)),
    }
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn caches() -> Option<(usize, usize, usize)> {
    None
}

#[cfg(target_arch = "x86_64")]
fn name() -> String {
    let Signature { maker, family, model } = Signature::here();
    let known = match (maker.as_str(), family, model) {
        ("AuthenticAMD", 0x17, 0x00..=0x2f) => "AMD Zen",
        ("AuthenticAMD", 0x17, _) => "AMD Zen 2",
        ("AuthenticAMD", 0x19, 0x10..=0x1f | 0x60..=0x7f | 0xa0..=0xaf) => "AMD Zen 4",
        ("AuthenticAMD", 0x19, _) => "AMD Zen 3",
        ("AuthenticAMD", 0x1a, _) => "AMD Zen 5",
        ("GenuineIntel", 6, 0x3c | 0x3f | 0x45 | 0x46) => "Intel Haswell",
        ("GenuineIntel", 6, 0x3d | 0x47 | 0x4f | 0x56) => "Intel Broadwell",
        ("GenuineIntel", 6, 0x55) => "Intel Skylake-X",
        ("GenuineIntel", 6, 0x6a | 0x6c) => "Intel Ice Lake",
        ("GenuineIntel", 6, 0x8f) => "Intel Sapphire Rapids",
        ("GenuineIntel", 6, 0xcf) => "Intel Emerald Rapids",
        ("GenuineIntel", 6, 0xad | 0xae) => "Intel Granite Rapids",
        _ => return format!("{maker} family {family} model {model}"),
    };
    known.into()
}

/// `Apple M4 Max`
#[cfg(all(target_os = "macos", not(target_arch = "x86_64")))]
fn name() -> String {
    crate::sysctl::text(c"machdep.cpu.brand_string").unwrap_or_else(|| std::env::consts::ARCH.into())
}

#[cfg(not(any(target_os = "macos", target_arch = "x86_64")))]
fn name() -> String {
    std::env::consts::ARCH.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_cover_k_and_depend_on_it_alone() {
        let cpu = Cpu { name: String::new(), l1: 32 << 10, l2: 1 << 20, l3: 32 << 20 };
        let blocking = Blocking::of(&cpu, Isa::Portable);
        for k in 0..2000 {
            let passes: Vec<_> = blocking.passes(k).collect();
            let mut next = 0;
            for &(start, len) in &passes {
                assert_eq!(start, next);
                assert!(len > 0 && len <= blocking.kc);
                next += len;
            }
            assert_eq!(next, k);
        }
        assert_eq!(blocking.passes(384).collect::<Vec<_>>(), [(0, 384)]);
        assert_eq!(blocking.passes(512).collect::<Vec<_>>(), [(0, 256), (256, 256)]);
    }

    #[test]
    fn this_cpu_has_a_name_and_caches() {
        let cpu = Cpu::detect();
        assert!(!cpu.name.is_empty());
        assert!(cpu.l1 > 0 && cpu.l2 >= cpu.l1);
    }
}
