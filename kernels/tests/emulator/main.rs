//! Tests of the emulated GPU: correct kernels give correct results in every order of lanes and warps,
//! injected bugs and machine-code faults are detected, and the driver's rules (memory, capture, replay) are
//! the rules of real drivers.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]

#[path = "../../../tests/support/deadlines.rs"]
mod deadlines;
#[path = "../emulated_gpu/mod.rs"]
mod emulated_gpu;

mod capture;
mod child_process;
mod correct_kernels;
mod gpu;
mod injected_bugs;
mod instructions;
mod lds_banks;
mod machine_code;
mod machine_code_faults;
mod machine_code_lint;
mod matrix;
mod memory;
mod peers;
mod rtc;
mod sanitizers;
mod scaled_matrix;
mod visible_devices;
