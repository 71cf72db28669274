//! Every GPU kernel against its CPU twin, outputs poisoned first: on the emulator with waves of 64 and 32 lanes,
//! and on a GPU where there is one.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]

#[path = "../emulated/mod.rs"]
mod emulated;
mod support;

mod elementwise;
mod embed;
mod moe_route;
mod norm;
mod qk_rope;
mod step;
