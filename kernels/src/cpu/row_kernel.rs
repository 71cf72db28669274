//! Row kernels: loops in plain Rust that are compiled once per instruction set.
//!
//! Element-wise kernels need no intrinsics: the compiler vectorises their loops for the target features of
//! the enclosing function. Rust never contracts or reorders f32 arithmetic, so all versions compute the same
//! bits.

use device::{CpuIsa, FloatElement};

/// A loop over the data in the fields of the implementing struct, which [`dispatch`] compiles for each
/// instruction set. `run` must be `#[inline(always)]`, and so must all functions that it calls.
pub(super) trait RowKernel {
    /// Runs the loop nest.
    fn run(self);
}

/// Row kernel: converts elements to a type that represents them exactly.
pub(super) struct RowConversion<'a, T, U> {
    pub(super) to: &'a mut [U],
    pub(super) from: &'a [T],
}

impl<T: FloatElement, U: FloatElement> RowKernel for RowConversion<'_, T, U> {
    #[inline(always)]
    fn run(self) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            *to = U::truncate(from.load());
        }
    }
}

/// Runs the version of the kernel for `isa`; the device has checked that the processor supports it.
pub(super) fn dispatch<K: RowKernel>(isa: CpuIsa, kernel: K) {
    match isa {
        // SAFETY: `CpuBackend::new` rejects an instruction set that the processor lacks.
        #[cfg(target_arch = "x86_64")]
        CpuIsa::Avx512 | CpuIsa::Avx512Bf16 => unsafe { avx512(kernel) },
        // SAFETY: `CpuBackend::new` rejects an instruction set that the processor lacks.
        #[cfg(target_arch = "x86_64")]
        CpuIsa::Avx2 => unsafe { avx2(kernel) },
        _ => kernel.run(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
fn avx512<K: RowKernel>(kernel: K) {
    kernel.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2<K: RowKernel>(kernel: K) {
    kernel.run();
}
