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
mod blaslt;
mod cache;
mod communicator;
mod config;
mod convert;
mod copy;
mod device;
mod draft;
mod elementwise;
mod embed;
mod error;
mod expert_count;
mod fence;
mod fp8;
mod gemm;
mod graph;
mod half;
mod jit;
mod latent;
mod latent_decode;
mod latent_expanded;
mod latent_plan;
mod launch;
mod linear;
mod linear_stream;
mod load;
mod lone;
mod many;
mod marks;
mod memory;
mod module;
mod moe;
mod moe_call;
mod moe_dispatch;
mod moe_little;
mod moe_products;
mod moe_route;
mod moe_stream;
mod norm;
mod one_shot;
mod peers;
mod qk_rope;
mod rope_attention;
mod route_rule;
mod routes;
mod runtime;
mod sample;
mod sample_parts;
mod skinny;
mod source;
mod step;
mod tensor_map;
mod trial;
mod weights;

pub use communicator::{Communication, Communicator, CommunicatorId};
pub use config::{HipConfig, Libraries};
pub use device::HipDevice;
pub use error::HipError;
pub use half::Half;
pub use hip_runtime_sys::Api;
pub use peers::{PeerMemory, PeerOffer};
pub use source::{Define, HEADERS, Source};

use crate::check;
