//! GPU backend for AMD (HIP runtime), NVIDIA (CUDA driver) and the SIMT emulator of the tests.
//!
//! Kernel sources of `kernels/csrc` are embedded in the binary and compiled when they are first launched or
//! precompiled. The Rust file of a kernel checks the shapes of an op, then launches the kernel:
//!
//! ```ignore
//! static NORM: KernelSource = kernel_source!("norm/norm.hip");
//!
//! impl GpuKernel for RmsNorm<'_> {
//!     fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
//!         self.check()?;
//!         let Self { mut y, x, weight, eps } = self;
//!         let kernel = gpu.kernel(&NORM, "rms_norm", &[("ACT_F32", gpu.act_f32("rms_norm", x.dtype())?)])?;
//!         let launch = KernelLaunch::new(kernel, [x.rows() as u32, 1, 1], 256, 0);
//!         let launch = launch.out(&mut y).arg(x).arg(weight).u32(x.cols() as u32).f32(eps);
//!         // SAFETY: shapes were checked above; the arguments are those of the kernel.
//!         unsafe { launch.launch(gpu, s) }
//!     }
//! }
//! ```

#![allow(clippy::trivially_copy_pass_by_ref, reason = "streams are passed as the traits pass them")]

/// Embeds the kernel source `kernels/csrc/PATH`.
macro_rules! kernel_source {
    ($path:literal) => {
        device::gpu::KernelSource {
            name: $path,
            text: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/csrc/", $path)),
        }
    };
}

mod attention;
mod attention_heads;
mod attention_prefill;
mod attention_single_row;
mod attention_splits;
mod backend;
mod convert;
mod draft;
mod elementwise;
mod embed;
mod expert_load;
mod foreign_step;
mod fp8;
mod gdn_chunk;
mod gemm;
mod gemm_large_m;
mod gemm_medium_m;
mod gemm_small_m;
mod launch_limits;
mod linear;
mod mla;
mod mla_decode;
mod mla_prefill;
mod mla_prefill_plan;
mod moe;
mod moe_call;
mod moe_dispatch;
mod moe_fused_decode;
mod moe_gemm;
mod moe_grouped_gemm_tma;
mod moe_route;
mod mxfp4;
mod norm;
mod one_shot_all_reduce;
mod pooling;
mod qk_rope;
mod recurrent;
mod rope_attention;
mod route_rule;
mod sample;
mod sample_vocab_parallel;
mod state_replay;
mod step;
mod weight_loader;

pub use backend::GpuBackend;

pub(crate) use moe::fits_routed_decode;

#[path = "../../csrc/headers.rs"]
mod headers;

pub use headers::HEADERS;
