//! Instruction sets with kernels of their own, and which of them this processor has.

/// An instruction set; the order is the order of preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CpuIsa {
    /// Plain Rust, any architecture.
    Portable,
    /// AVX2 with fused multiply-add and f16 conversions.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
    /// AVX-512 with paired bf16 dot products.
    Avx512Bf16,
}

impl CpuIsa {
    /// All of them, slowest first.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16];

    /// The best one this processor has.
    #[must_use]
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.available()).unwrap_or(Self::Portable)
    }

    /// Whether this processor has it.
    #[must_use]
    pub fn available(self) -> bool {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq");
            match self {
                Self::Portable => true,
                Self::Avx2 => avx2,
                Self::Avx512 => avx512,
                Self::Avx512Bf16 => avx512 && is_x86_feature_detected!("avx512bf16"),
            }
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        {
            self == Self::Portable
        }
    }

    /// Its name, for reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512-bf16",
        }
    }
}
