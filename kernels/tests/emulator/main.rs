//! The emulated GPU itself: that right kernels run right in every order of lanes and waves, that planted bugs are
//! caught, and that the driver's rules (memory, capture, replay) are those of hardware.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[path = "../emulated/mod.rs"]
mod emulated;

mod capture;
mod children;
mod clean;
mod gpu;
mod matrix;
mod memory;
mod planted;
mod rtc;
mod sanitizers;
