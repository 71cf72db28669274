//! Calls the C interface as a foreign host does: a small server with its own blocks, streams and graphs.
//!
//! The models are fixtures of `tests/data/golden` with synthetic weights, on the CPU and on the emulated GPU.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]

#[path = "../../../tests/support/deadlines.rs"]
mod deadlines;
#[path = "../../../kernels/tests/emulated_gpu/mod.rs"]
mod emulated_gpu;
mod gpu_host;
mod host_memory;
mod test_host;
mod test_model;

mod arguments;
mod graphs;
mod header;
mod ranks;
mod steps;
