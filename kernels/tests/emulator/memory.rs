//! Memory of the emulated GPU: size limits, poisoned allocations, bounds checks of copies; and rejected
//! launches.

use hip_runtime_sys::code;

use crate::child_process;
use crate::gpu::{EmulatedGpu, KernelArg, LaunchShape};
use crate::injected_bugs::ROWS;

const INVALID_VALUE: i32 = 1;
const INVALID_CONFIGURATION: i32 = 9;

#[test]
fn fresh_memory_is_nan_and_copies_are_checked() {
    let gpu = EmulatedGpu::open();
    let memory = gpu.alloc(64);
    assert!(gpu.download::<f32>(memory).iter().all(|v| v.is_nan()));
    let beyond = memory.at.wrapping_byte_add(1);
    let from = [0u8; 64];
    // SAFETY: the emulated driver rejects copies that exceed an allocation.
    unsafe {
        let d = &gpu.driver;
        let code = (d.copy_to_device)(beyond, from.as_ptr().cast(), 64, gpu.stream);
        assert_eq!(code, INVALID_VALUE);
        assert_eq!((d.copy_on_device)(memory.at, beyond, 64, gpu.stream), INVALID_VALUE);
        assert_eq!((d.fill)(beyond, 0, 64, gpu.stream), INVALID_VALUE);
        assert_eq!((d.free)(beyond), INVALID_VALUE);
    }
    gpu.free(memory);
}

#[test]
#[ignore = "run by memory_runs_out_at_the_configured_size"]
fn small_device() {
    let gpu = EmulatedGpu::open();
    let info = || {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes to `free` and `total`, which are writable.
        assert_eq!(unsafe { (gpu.driver.mem_info)(&raw mut free, &raw mut total) }, 0);
        (free, total)
    };
    assert_eq!(info(), (1 << 20, 1 << 20));
    let half = gpu.alloc(1 << 19);
    assert_eq!(info(), (1 << 19, 1 << 20));
    let mut at = std::ptr::null_mut();
    // SAFETY: the driver writes the address to `at`, which is writable.
    let code = unsafe { (gpu.driver.alloc)(&raw mut at, (1 << 19) + 1) };
    assert_eq!(code, code::OUT_OF_MEMORY);
    assert!(at.is_null());
    gpu.free(half);
    gpu.alloc(1 << 20);
}

#[test]
fn memory_runs_out_at_the_configured_size() {
    child_process::passed(&child_process::run(
        "memory::small_device",
        &[("HIPEMU_MEMORY", "1M")].into(),
    ));
}

#[test]
fn launches_over_the_limits_are_rejected() {
    let gpu = EmulatedGpu::open();
    // This kernel is compiled for at most 256 threads per block.
    let kernel = gpu.kernel(ROWS, &[], "count_threads");
    let count = gpu.upload(&[0u32; 3]);
    for (shape, expected) in [
        (LaunchShape(1, 256, 64 << 10), code::SUCCESS),
        (LaunchShape(1, 257, 0), INVALID_CONFIGURATION),
        (LaunchShape(1, 64, (64 << 10) + 1), INVALID_CONFIGURATION),
        (LaunchShape(0, 64, 0), INVALID_CONFIGURATION),
        (LaunchShape(1, 0, 0), INVALID_CONFIGURATION),
    ] {
        assert_eq!(gpu.try_launch(kernel, shape, &[KernelArg::At(count)]), expected);
    }
}

#[test]
#[ignore = "run by zero_devices_return_no_device"]
fn no_device() {
    let gpu_count = || {
        let library = crate::emulated_gpu::library();
        let search = hip_runtime_sys::LibrarySearchPaths::named("driver", &library);
        let driver =
            hip_runtime_sys::DriverApi::open(hip_runtime_sys::GpuApi::Hip, &search).unwrap();
        // SAFETY: no other driver function is called before in this process.
        unsafe { (driver.init)(0) }
    };
    assert_eq!(gpu_count(), code::NO_DEVICE);
}

#[test]
fn zero_devices_return_no_device() {
    child_process::passed(&child_process::run(
        "memory::no_device",
        &[("HIPEMU_DEVICES", "0")].into(),
    ));
}
