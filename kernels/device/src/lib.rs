//! Devices: CPU and GPU with their runtime libraries, memory, streams, events and graphs, and the JIT
//! compiler of GPU kernels.
//!
//! [`DeviceDriver`] is the trait of all devices. It is object-safe, because a virtual call takes nanoseconds
//! and a launch takes microseconds. [`CpuDevice`] exists in every build. [`gpu::GpuDevice`] is one GPU,
//! controlled through the HIP runtime, the CUDA driver or the emulator. The kernels that run on devices are
//! in the crate `kernels`.

#![allow(clippy::cast_ptr_alignment, reason = "buffers are 64-byte aligned and views typed")]
#![allow(clippy::inline_always, reason = "conversions of elements are inlined into row kernels")]

#[cfg(test)]
#[path = "../../../tests/support/bounded_child.rs"]
mod bounded_child;
mod buffer;
mod check;
mod cpu;
mod device_driver;
mod dtype;
mod error;
mod fp8_e4m3;
pub mod gpu;
mod host_shared_memory;
mod mapped_file;
mod mat;
mod pinned_memory;
mod timestamps;

pub use buffer::{Buffer, BufferDeallocator, BufferPart, BufferPartMut};
pub use check::{check_at_least, check_at_most, check_dense, check_dtype, check_size};
pub use cpu::{CpuConfig, CpuDevice, CpuIsa, ThreadPool, physical_cores};
pub use device_driver::{CapturedGraph, DeviceDriver, DeviceStream, DriverCallCounts, MemInfo};
pub use dtype::{DType, DeviceElement, FloatElement, bf16, f16};
pub use error::DeviceError;
pub use fp8_e4m3::Fp8E4m3;
pub use host_shared_memory::HostSharedMemory;
pub use mapped_file::MappedFile;
pub use mat::{MatMut, MatRef};
pub use pinned_memory::{CopyInFlight, PinnedBuffer};
pub use timestamps::TimestampEvents;
