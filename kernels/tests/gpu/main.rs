//! Compares every GPU kernel with its CPU reference. Outputs are filled with poison values before a launch.
//! By default the tests run on the emulator with warps of 64 and of 32 lanes; on a GPU they run with:
//!
//! `HADRON_GPU=cuda cargo test --release -p kernels --test gpu -- --include-ignored --nocapture
//! --test-threads 1`
//!
//! (or `rocm`; `HADRON_GPU_FOLDERS` adds library folders to those of the loader, `HADRON_SEED` repeats the
//! inputs of a failed test). Ignored tests measure a GPU (`just gpu-speed`) and are not useful on the
//! emulator.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]
#![allow(clippy::print_stdout, reason = "measurements, and the seed of a failed test")]
#![allow(dead_code, reason = "each module uses a part of the support code")]

#[path = "../../../tests/support/deadlines.rs"]
mod deadlines;
mod device_pair;
#[path = "../emulated_gpu/mod.rs"]
mod emulated_gpu;
mod support;

mod activation_scales;
mod attention;
mod attention_speed;
mod blas_library;
mod cards;
mod device;
mod draft;
mod elementwise;
mod embed;
mod errors;
mod expert_speed;
mod float16;
mod foreign_step;
mod fp8;
mod gemm_large_m;
mod kv_fp8;
mod kv_head_scales;
mod linear;
mod matrix_speed;
mod mla;
mod mla_case;
mod mla_prefill;
mod mla_speed;
mod moe;
mod moe_dispatch;
mod moe_fp8;
mod moe_fp8_tma;
mod moe_route;
mod norm;
mod pooling;
mod qk_norm;
mod qk_rope;
mod recurrent;
mod recurrent_speed;
mod replay_case;
mod rope_attention;
mod row_speed;
mod sample;
mod secondary_stream;
mod shared_expert_speed;
mod speed;
mod state_replay;
mod step;
mod weights;
