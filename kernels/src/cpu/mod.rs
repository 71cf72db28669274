//! The CPU device: embedded default, and the oracle for every other backend.
//!
//! Each kernel exists once per instruction set where that pays, else as plain code that the compiler
//! vectorises; [`CpuIsa`] is chosen when the device is made. Launches run to their end before they return.

mod attention;
mod device;
mod draft;
mod elementwise;
mod embed;
mod isa;
mod linear;
mod maths;
mod matmul_tile;
mod memory;
mod mla;
mod moe;
mod moe_dispatch;
mod norm;
mod pack;
mod qk_rope;
mod route;
mod row_kernel;
mod sample;
mod shared_rows;
mod step;
mod thread_pool;
mod topology;

pub use device::{CpuConfig, CpuDevice};
pub use isa::CpuIsa;
pub use step::GREEDY_BELOW;
pub use thread_pool::ThreadPool;
pub use topology::physical_cores;
