//! The GPU device: one backend for AMD (HIP), NVIDIA (the CUDA driver) and the SIMT emulator, which all
//! answer to the tables of `hip-runtime-sys`.
//!
//! Kernels are the sources of `kernels/csrc`, embedded and compiled when they are first asked for. A
//! kernel's file here checks shapes, then launches:
//!
//! ```ignore
//! static NORM: Source = Source { name: "norm/norm.hip", text: include_str!("../../csrc/norm/norm.hip") };
//!
//! impl HipDevice {
//!     pub(super) fn norm_rows(&self, s: &Stream, mut y: MatMut<'_>, x: Mat<'_>, w: Mat<'_>, eps: f32) -> Result<(), DeviceError> {
//!         check_size("rms_norm", "w", w.cols(), x.cols())?; // and so on
//!         let kernel = self.kernel(&NORM, "rms_norm", &[("ACT_F32", self.act_f32("rms_norm", x.dtype())?)])?;
//!         let launch = Launch::new(kernel, (x.rows() as u32, 1, 1), 256, 0);
//!         let launch = launch.out(&mut y).arg(x).arg(w).u32(x.cols() as u32).f32(eps);
//!         // SAFETY: shapes were checked above; the arguments are those of the kernel.
//!         unsafe { launch.go(self, s) }
//!     }
//! }
//! ```

#![allow(clippy::trivially_copy_pass_by_ref, reason = "streams are passed as the traits pass them")]

mod attention;
mod attention_single_row;
mod autotune;
mod blaslt;
mod communicator;
mod config;
mod convert;
mod copy;
mod device;
mod draft;
mod elementwise;
mod embed;
mod error;
mod expert_load;
mod fence;
mod fp8;
mod gemm;
mod gemm_large_m;
mod gemm_medium_m;
mod gemm_small_m;
mod gpu_runtime;
mod graph;
mod half_dtype;
mod jit;
mod kernel_cache;
mod kernel_launch;
mod kernel_module;
mod kernel_source;
mod kernel_table;
mod linear;
mod memory;
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
mod norm;
mod one_shot_all_reduce;
mod peer_memory;
mod qk_rope;
mod rope_attention;
mod route_rule;
mod sample;
mod sample_vocab_parallel;
mod step;
mod tensor_map;
mod timestamps;
mod weight_loader;
mod weight_memory;

pub use communicator::{CollectiveLibrary, CommunicatorId, GpuCommunicator};
pub use config::{GpuConfig, GpuLibraries};
pub use device::GpuDevice;
pub use error::GpuError;
pub use half_dtype::HalfDtype;
pub use hip_runtime_sys::GpuApi;
pub use kernel_source::{HEADERS, KernelDefine, KernelSource};
pub use peer_memory::{PeerMemory, PeerMemoryHandle};

use crate::check;
