//! GPU device, which uses the HIP runtime (AMD), the CUDA driver (NVIDIA) or the SIMT emulator, through the
//! function tables of `hip-runtime-sys`.

#![allow(clippy::trivially_copy_pass_by_ref, reason = "streams are passed as the traits pass them")]

mod autotune;
mod blaslt;
mod card;
mod config;
mod copy;
mod device;
mod error;
mod fence;
mod foreign_stream;
mod gpu_inventory;
mod gpu_properties;
mod gpu_runtime;
mod graph;
mod half_dtype;
mod jit;
mod kernel_cache;
mod kernel_launch;
mod kernel_module;
mod kernel_source;
pub mod memory;
mod peer_link;
mod peer_view;
mod tensor_map;
mod timestamps;
mod weight_memory;

pub use blaslt::{Fp8Scaling, GemmOperands, GemmProblem, HEURISTIC};
pub use card::GpuProductSpec;
pub use config::{GpuConfig, GpuLibrarySelection};
pub use device::GpuDevice;
pub use error::GpuError;
pub use fence::GpuFence;
pub use foreign_stream::ForeignStreamGuard;
pub use gpu_inventory::{FoundLibrary, GpuInventory, LibraryRole, LibrarySearchResult, ListedGpu};
pub use gpu_runtime::{GpuRuntime, MemoryKind, PeerDeviceHandle};
pub use half_dtype::{HalfDtype, blas_data_type};
pub use hip_runtime_sys::{GpuApi, LibrarySearchPaths};
pub use kernel_launch::KernelLaunch;
pub use kernel_module::KernelFunction;
pub use kernel_source::{KernelBuild, KernelDefine, KernelHeaders, KernelSource};
pub use peer_link::{PeerLink, PeerLinkKind};
pub use peer_view::{PeerMemoryView, PeerMemoryViewParts};
pub use tensor_map::{BOX_ROWS, TensorMap, TmaMatrix};
