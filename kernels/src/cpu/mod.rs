//! The CPU device: embedded default, and the oracle for every other backend.
//!
//! Each kernel exists once per instruction set where that pays, else as plain code that the compiler
//! vectorises; [`Isa`] is chosen when the device is made. Launches run to their end before they return.

mod attention;
mod device;
mod draft;
mod elementwise;
mod embed;
mod isa;
mod latent;
mod linear;
mod maths;
mod memory;
mod moe;
mod moe_dispatch;
mod norm;
mod pack;
mod pool;
mod product;
mod qk_rope;
mod route;
mod row_kernel;
mod sample;
mod share;
mod step;
mod topology;

pub use device::{CpuConfig, CpuDevice};
pub use isa::Isa;
pub use pool::ThreadPool;
pub use step::GREEDY_BELOW;
pub use topology::physical_cores;
