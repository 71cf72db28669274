//! Linear layers on hipBLASLt, for which the emulator provides a mock library (`blaslt.cpp`).

use crate::emulated_gpu::bounded_child::run_to_end;
use std::path::{Path, PathBuf};
use std::process::Command;

use device::gpu::{GpuConfig, GpuLibrarySelection};
use device::{DType, DeviceDriver, bf16};
use kernels::Linear;
use kernels::gpu::GpuBackend;

use crate::device_pair::{CpuGpuPair, tolerance};
use crate::emulated_gpu;
use crate::fp8::{ScaleGranularity, check_large_m};
use crate::support::{S, emulator};

/// Returns the emulated GPU with `blaslt.cpp` as its BLAS library, which supports the fp8 format of the
/// emulated architecture only.
fn device() -> GpuBackend {
    let is_fnuz = GpuBackend::open(&emulator(64)).unwrap().arch() == "gfx942";
    let fp8_type = if is_fnuz { "-DFP8_TYPE=1000" } else { "-DFP8_TYPE=28" };
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/blaslt.cpp");
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let library = folder.join(format!(
        "libblaslt-{}-{:?}.so",
        std::process::id(),
        std::thread::current().id()
    ));
    let options = ["-std=c++17", fp8_type, "-O2", "-fPIC", "-shared", "-Wall", "-Werror", "-o"];
    let compiled = run_to_end(Command::new("c++").args(options).arg(&library).arg(&source));
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let config = emulator(64);
    let GpuLibrarySelection::Named { api, driver, rtc, .. } = config.libraries else {
        unreachable!()
    };
    let libraries = GpuLibrarySelection::Named {
        api,
        driver,
        rtc,
        blas: Some(library.clone()),
        collectives: None,
    };
    let device = GpuBackend::open(&GpuConfig { libraries, ..config }).unwrap();
    std::fs::remove_file(library).unwrap();
    device
}

/// Checks a GEMM of this size for every combination of dtypes, with and without a bias.
fn check(pair: &CpuGpuPair, rows: usize, n: usize, k: usize) {
    const F: DType = DType::F32;
    const B: DType = DType::BF16;
    for (types, with_bias) in [
        ([B, B, B], true),
        ([B, B, B], false),
        ([B, B, F], true),
        ([F, F, F], true),
        ([B, F, F], true),
        ([B, F, F], false),
    ] {
        let mut numbers = pair.numbers((rows * n) as u64);
        let x = pair.random(&mut numbers, types[0], rows, k);
        let [w, w_cpu] = pair.pack(&numbers.reals::<f32>(n * k), n, k, types[1]);
        // A bf16 checkpoint has bf16 biases.
        let bias: Vec<f32> = numbers.reals::<device::bf16>(n).iter().map(|x| x.to_f32()).collect();
        let bias = pair.put(&bias, 1, n);
        let mut y = pair.poisoned(types[2], rows, n);
        let gpu_bias = with_bias.then(|| bias.gpu());
        pair.gpu
            .launch(&S, Linear { y: y.gpu_mut(), x: x.gpu(), weight: &w, bias: gpu_bias })
            .unwrap();
        let cpu_bias = with_bias.then(|| bias.cpu());
        pair.cpu
            .launch(&S, Linear { y: y.cpu_mut(), x: x.cpu(), weight: &w_cpu, bias: cpu_bias })
            .unwrap();
        pair.check(&format!("{rows} x {n} x {k} {types:?}"), &y, tolerance(types[2]));
    }
}

#[test]
fn blas_gemm_agrees_with_the_cpu() {
    let pair = CpuGpuPair::new(device().into());
    assert!(pair.gpu.name().contains("with a BLASLt library"), "{}", pair.gpu.name());
    // Numbers of rows (algorithms are cached per bucket, a rounded-up number of rows): inside a bucket, at
    // the end of a bucket, an odd number (for which the mock requires an algorithm for exactly this number),
    // in a bucket that the mock does not support; and above 64 (`F32_ROWS`), where f32 GEMMs use the library
    // too. The mock supports no GEMM with 8 outputs.
    for (rows, n, k) in [
        (18, 24, 40),
        (32, 33, 18),
        (35, 16, 64),
        (40, 16, 64),
        (66, 20, 36),
        (131, 12, 24),
        (100, 8, 24),
        (98, 8, 24),
    ] {
        check(&pair, rows, n, k);
    }
    // Sizes that are first used after autotuning is frozen: near a tuned size, and with untuned weight
    // shapes.
    pair.gpu.freeze_autotuning();
    for (rows, n, k) in [(50, 24, 40), (41, 16, 64), (18, 28, 44)] {
        check(&pair, rows, n, k);
    }
}

/// Returns the names of the kernels that `launches` launches.
fn launched_kernels(gpu: &GpuBackend, launches: impl FnOnce()) -> Vec<&'static str> {
    gpu.begin_kernel_timestamps(&gpu.alloc_timestamps(16).unwrap(), 0);
    launches();
    gpu.end_kernel_timestamps()
}

/// The library multiplies fp8 matrices with per-channel and per-token scales. The header of hipBLASLt marks
/// block scales as "not supported yet", so matrices with block scales use the built-in kernel.
fn check_fp8() {
    let pair = CpuGpuPair::new(device().into());
    let (channels, blocks) = (ScaleGranularity::Channels, ScaleGranularity::Blocks);
    for (rows, n, k, grid, expected) in [
        (32, 64, 128, channels, "blaslt_gemm"),
        (18, 32, 64, channels, "blaslt_gemm"),
        (32, 40, 64, channels, "fp8_gemm"), // 40 outputs are no multiple of 16.
        (32, 128, 128, blocks, "fp8_gemm"),
    ] {
        let launches = || check_large_m::<bf16>(&pair, rows, n, k, grid);
        let names = launched_kernels(&pair.gpu, launches);
        assert!(names.contains(&expected), "{rows} x {n} x {k} {grid:?}: {names:?}");
    }
}

#[test]
fn blas_fp8_gemm_scales_channels_and_tokens() {
    check_fp8();
}

#[test]
#[ignore = "run by blas_fp8_gemm_uses_the_format_of_the_gpu"]
#[expect(clippy::disallowed_methods, reason = "the environment selects the GPU under test")]
fn fp8_gemm_of_this_architecture() {
    if std::env::var_os("HADRON_GPU").is_none() {
        check_fp8();
    }
}

#[test]
fn blas_fp8_gemm_uses_the_format_of_the_gpu() {
    for gfx in ["942", "950"] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--ignored", "--exact", "blas_library::fp8_gemm_of_this_architecture"]);
        let output = run_to_end(child.env("HIPEMU_GFX", gfx));
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "gfx{gfx}: {text}");
    }
}

/// Number and size of the cache sweeps of the timings in this process: `hipemuTimedFills`.
fn timed_fills() -> (u64, u64) {
    let (mut timings, mut fewest_bytes) = (0, 0);
    // SAFETY: the emulator's library has this function, which writes two numbers.
    unsafe {
        let library = libloading::Library::new(emulated_gpu::library()).unwrap();
        let fills = library.get::<unsafe extern "C" fn(*mut u64, *mut u64)>(b"hipemuTimedFills");
        fills.unwrap()(&raw mut timings, &raw mut fewest_bytes);
    }
    (timings, fewest_bytes)
}

#[test]
#[ignore = "child process, run by trials_on_an_mi300x_evict_the_infinity_cache"]
#[expect(clippy::disallowed_methods, reason = "the environment selects the GPU under test")]
fn autotune_on_this_card() {
    if std::env::var_os("HIPEMU_CARD").is_none() {
        return;
    }
    // A GEMM of one combination of types: its first launch times the algorithms of the library.
    let pair = CpuGpuPair::new(device().into());
    let mut numbers = pair.numbers(1);
    let x = pair.random(&mut numbers, DType::BF16, 18, 40);
    let [w, _] = pair.pack(&numbers.reals::<f32>(24 * 40), 24, 40, DType::BF16);
    let mut y = pair.poisoned(DType::BF16, 18, 24);
    let op = Linear { y: y.gpu_mut(), x: x.gpu(), weight: &w, bias: None };
    pair.gpu.launch(&S, op).unwrap();
    let (timings, fewest_bytes) = timed_fills();
    println!("{timings} timings, each after fills of at least {fewest_bytes} bytes");
    assert!(timings >= 8 && fewest_bytes >= 256 << 20);
}

/// HIP reports the L2 cache of one XCD, 4 MiB, but weights stay in the Infinity Cache of 256 MiB.
#[test]
fn trials_on_an_mi300x_evict_the_infinity_cache() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--ignored", "--exact", "--nocapture", "blas_library::autotune_on_this_card"]);
    let output = run_to_end(child.env_remove("HIPEMU_GFX").env("HIPEMU_CARD", "MI300X"));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains(" timings, each after fills"), "{text}");
}
