//! Host CPU as a device: thread pool, memory and instruction set.

mod device;
mod isa;
mod memory;
mod thread_pool;
mod topology;

pub use device::{CpuConfig, CpuDevice};
pub use isa::CpuIsa;
pub(crate) use memory::host_memory;
pub use thread_pool::ThreadPool;
pub use topology::physical_cores;
