//! The CPU device: embedded default, and the oracle for every other backend.
//!
//! Each kernel exists once per instruction set where that pays, else as plain code that the compiler
//! vectorises; [`CpuIsa`](device::CpuIsa) is chosen when the device is made. Launches run to their end before they return.

mod attention;
mod backend;
mod draft;
mod elementwise;
mod embed;
mod gpu_only;
mod linear;
mod maths;
mod matmul_tile;
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

pub use backend::CpuBackend;
pub use step::GREEDY_BELOW;
