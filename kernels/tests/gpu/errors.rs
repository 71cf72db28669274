//! Error messages for a missing GPU, too little GPU memory, and kernels that do not compile.

use device::gpu::{GpuConfig, GpuLibrarySelection, HalfDtype, KernelBuild, KernelSource};
use device::{DeviceDriver, DeviceError};
use kernels::gpu::GpuBackend;

use crate::support::emulator;

#[test]
fn a_missing_library_names_what_was_tried() {
    for (libraries, what) in
        [(GpuLibrarySelection::Rocm, "libamdhip64.so"), (GpuLibrarySelection::Cuda, "libcuda.so.1")]
    {
        let config = GpuConfig { libraries, ..GpuConfig::default() };
        match GpuBackend::open(&config) {
            Ok(device) => println!("this machine has {}", device.name()),
            // If the driver library exists but no device does, the error message reports that.
            Err(error) => assert!(error.to_string().contains(what), "{error}"),
        }
    }
}

#[test]
fn missing_device_error_reports_device_count() {
    let error = GpuBackend::open(&GpuConfig { device: 9, ..emulator(64) }).unwrap_err().to_string();
    // The emulator has eight devices, or those that CUDA_VISIBLE_DEVICES names.
    let found: Option<u32> = error.rsplit_once("finds ").and_then(|(_, count)| count.parse().ok());
    assert!(error.starts_with("no device 9: ") && matches!(found, Some(1..=8)), "{error}");
}

#[test]
fn out_of_memory_reports_all_sizes() {
    let device = GpuBackend::open(&emulator(64)).unwrap();
    let total = device.mem_info().total_bytes;
    let error = device.alloc(total as usize + 1).unwrap_err().to_string();
    let wanted = format!("{} bytes requested", (total + 1).next_multiple_of(256));
    assert!(error.starts_with("out of device memory on "), "{error}");
    assert!(error.contains(&wanted) && error.contains(&format!("of {total} free")), "{error}");
    assert!(device.alloc(1).is_ok(), "the device is as good as before");
}

static BROKEN: KernelSource = KernelSource {
    name: "broken/broken.hip",
    text: "#include \"dev.h\"\nKERNEL(64) broken(float* y) { y[tid()] = missing; }\nEXPORT(broken)\n",
};
static WHOLE: KernelSource = KernelSource {
    name: "whole/whole.hip",
    text: "#include \"dev.h\"\nKERNEL(64) whole(float* y) { y[tid()] = SIZE; }\nEXPORT(whole)\n",
};

#[test]
fn a_kernel_that_does_not_compile_names_file_and_reason() {
    let device = GpuBackend::open(&emulator(32)).unwrap();
    let error =
        device.compile(&[KernelBuild { source: &BROKEN, defines: vec![("SIZE", 3)] }]).unwrap_err();
    let DeviceError::Gpu(error) = error else { panic!("{error}") };
    let text = error.to_string();
    assert!(text.starts_with("broken/broken.hip does not compile for "), "{text}");
    assert!(text.contains("-DWARP_SIZE=32 -DSIZE=3"), "{text}");
    assert!(text.contains("broken/broken.hip:2") && text.contains("missing"), "{text}");
}

#[test]
fn parallel_compile_is_cached_for_next_device() {
    let folder = std::env::temp_dir().join(format!("hadron-gpu-cache-{}", std::process::id()));
    let config = GpuConfig { cache_dir: Some(folder.clone()), ..emulator(64) };
    let build = |size| KernelBuild { source: &WHOLE, defines: vec![("SIZE", size)] };
    let builds: Vec<_> = (1..4).map(build).collect();
    let files = || -> Vec<_> {
        let mut files: Vec<_> = std::fs::read_dir(&folder)
            .unwrap()
            .map(|f| f.unwrap())
            .map(|f| (f.path(), f.metadata().unwrap().modified().unwrap()))
            .collect();
        files.sort();
        files
    };
    let device = GpuBackend::open(&config).unwrap();
    device.compile(&builds).unwrap();
    let compiled = files();
    assert_eq!(compiled.len(), 3);
    let again = GpuBackend::open(&config).unwrap();
    again.compile(&builds).unwrap();
    assert_eq!(files(), compiled, "nothing was written anew");
    // A cached kernel image that is damaged is compiled again; a kernel for another 16-bit type needs a
    // separate image.
    std::fs::write(&compiled[0].0, b"damaged").unwrap();
    GpuBackend::open(&config).unwrap().compile(&builds).unwrap();
    GpuBackend::open(&GpuConfig { half_dtype: HalfDtype::F16, ..config })
        .unwrap()
        .compile(&builds)
        .unwrap();
    assert_eq!(files().len(), 6);
    assert!(std::fs::read(&compiled[0].0).unwrap().len() > 1000);
    std::fs::remove_dir_all(&folder).unwrap();
}
