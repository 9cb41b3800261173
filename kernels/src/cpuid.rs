//! Which CPU this is, as x86-64's `cpuid` tells it.

use std::arch::x86_64::__cpuid;

/// Maker, family and model.
pub struct Signature {
    /// `GenuineIntel`, `AuthenticAMD`, …
    pub maker: String,
    /// Base and extended family together.
    pub family: u32,
    /// Base and extended model together.
    pub model: u32,
}

impl Signature {
    /// This one.
    pub fn here() -> Signature {
        #[allow(unused_unsafe, reason = "safe in newer compilers than the oldest that we support")]
        // SAFETY: every x86-64 CPU has these leaves.
        let (maker, signature) = unsafe { (__cpuid(0), __cpuid(1).eax) };
        let maker = [maker.ebx, maker.edx, maker.ecx].map(u32::to_le_bytes).concat();
        let base = signature >> 8 & 0xf;
        Signature {
            maker: String::from_utf8_lossy(&maker).into_owned(),
            family: if base == 0xf { base + (signature >> 20 & 0xff) } else { base },
            model: signature >> 4 & 0xf | (signature >> 16 & 0xf) << 4,
        }
    }

    /// Whether AMD made it.
    pub fn is_amd(&self) -> bool {
        self.maker == "AuthenticAMD"
    }
}
