//! The CPU backend: it runs in the embedded (in-process) executor by default, and GPU results are compared
//! with its results.
//!
//! A kernel has one implementation per instruction set if that is faster, otherwise one implementation that
//! the compiler vectorises. [`CpuIsa`](device::CpuIsa) is selected when the device is created. Launches are
//! synchronous: they return after the op has completed.

mod attention;
mod backend;
mod draft;
mod elementwise;
mod embed;
mod foreign_step;
mod gpu_only;
mod linear;
mod maths;
mod matmul_tile;
mod mla;
mod moe;
mod moe_dispatch;
mod norm;
mod pack;
mod pooling;
mod qk_rope;
mod recurrent;
mod route;
mod row_kernel;
mod sample;
mod shared_rows;
mod state_replay;
mod step;

pub use backend::CpuBackend;
pub use step::GREEDY_BELOW;
