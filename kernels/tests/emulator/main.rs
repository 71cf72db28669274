//! The emulated GPU itself: that right kernels run right in every order of lanes and waves, that planted bugs are
//! caught, and that the driver's rules (memory, capture, replay) are those of hardware.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[path = "../emulated_gpu/mod.rs"]
mod emulated_gpu;

mod capture;
mod child_process;
mod correct_kernels;
mod gpu;
mod injected_bugs;
mod matrix;
mod memory;
mod rtc;
mod sanitizers;
