//! Plain Rust compiled once per instruction set.
//!
//! Element-wise kernels need no intrinsics: the compiler vectorises their loops for whatever the
//! enclosing function enables. Rust never contracts or reorders f32 arithmetic, so all versions give
//! the same bits.

use device::{CpuIsa, FloatElement};

/// A loop nest over captured data. `run` must be `#[inline(always)]`, as must all it calls.
pub(super) trait RowKernel {
    /// Does the work.
    fn run(self);
}

/// Elements of one type as those of another that holds them exactly.
pub(super) struct WidenRow<'a, T, U> {
    pub(super) to: &'a mut [U],
    pub(super) from: &'a [T],
}

impl<T: FloatElement, U: FloatElement> RowKernel for WidenRow<'_, T, U> {
    #[inline(always)]
    fn run(self) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            *to = U::truncate(from.load());
        }
    }
}

/// Runs the version for `isa`, which the device has checked to be available.
pub(super) fn dispatch<K: RowKernel>(isa: CpuIsa, kernel: K) {
    match isa {
        // SAFETY: `CpuBackend::new` refuses an instruction set that the processor lacks.
        #[cfg(target_arch = "x86_64")]
        CpuIsa::Avx512 | CpuIsa::Avx512Bf16 => unsafe { avx512(kernel) },
        // SAFETY: as above.
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
