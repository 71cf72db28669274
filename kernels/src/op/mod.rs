//! Ops: one struct per computation, with named arguments. `backend.launch(stream, op)` runs an op.
//!
//! Every output element is one sum in a fixed order of additions. The result of a row therefore depends
//! neither on other rows, nor on how its prompt was divided into prefill chunks, nor on the number of
//! threads. Sums, norms, softmax and rotations are computed in f32; a result is rounded once, when it is
//! stored.
//!
//! To add an op, write its struct here, `impl CpuKernel` in `cpu/`, `impl GpuKernel` in `gpu/`, its device
//! code in `csrc/`, and the code in the crate `ops` that launches it.

mod all_reduce;
mod attention;
mod dense;
mod draft;
mod foreign_step;
mod linear;
mod mla;
mod moe;
mod recurrent;
mod sampling;
mod state_replay;
mod step;
mod support;

pub use all_reduce::*;
pub use attention::*;
pub use dense::*;
pub use draft::*;
pub use foreign_step::*;
pub use linear::*;
pub use mla::*;
pub use moe::*;
pub use recurrent::*;
pub use sampling::*;
pub use state_replay::*;
pub use step::*;

use device::{DeviceError, DeviceStream};

use crate::cpu::CpuBackend;
use crate::gpu::GpuBackend;

/// An op that the CPU backend can run. The op has completed when `run` returns.
pub trait CpuKernel {
    /// Checks the arguments, then computes the op.
    ///
    /// Errors: shapes or types contradict each other, or the op does not exist on the CPU.
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError>;
}

/// An op that the GPU backend can launch.
pub trait GpuKernel {
    /// Checks the arguments, then launches the op on stream `s`.
    ///
    /// Errors: shapes or types contradict each other, or the driver fails.
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError>;
}
