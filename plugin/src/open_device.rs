//! Opens the device that the options select.

use std::thread::available_parallelism;

use device::CpuConfig;
use device::gpu::{GpuApi, GpuConfig, GpuLibrarySelection, HalfDtype};
use kernels::KernelBackend;
use kernels::cpu::CpuBackend;
use kernels::gpu::GpuBackend;

use crate::options::{DeviceOption, DtypeOption, LibraryPaths};
use crate::{PluginError, PluginOptions};

/// Opened device, and the number of host threads that prepare weights for it.
pub(crate) struct OpenedBackend {
    pub(crate) backend: KernelBackend,
    pub(crate) threads: usize,
}

/// Opens the device of `options` for one of `ranks` ranks. By default, the CPU cores are divided equally among the ranks.
pub(crate) fn open(options: &PluginOptions, ranks: usize) -> Result<OpenedBackend, PluginError> {
    let cores = available_parallelism().map_or(1, usize::from);
    let Some(config) = gpu_config(options) else {
        let share = if ranks > 1 { (cores / ranks).max(1) } else { 0 };
        let threads = options.threads.unwrap_or(share);
        let cpu = CpuBackend::new(CpuConfig { threads, ..CpuConfig::default() })?;
        let threads = cpu.threads().threads();
        return Ok(OpenedBackend { backend: cpu.into(), threads });
    };
    let threads = options.threads.unwrap_or(cores);
    Ok(OpenedBackend { backend: GpuBackend::open(&config)?.into(), threads })
}

/// Returns the configuration of a GPU; `None` if the device is the CPU.
fn gpu_config(options: &PluginOptions) -> Option<GpuConfig> {
    let (api, system) = match options.device {
        DeviceOption::Cpu => return None,
        DeviceOption::Cuda => (GpuApi::Cuda, GpuLibrarySelection::Cuda),
        DeviceOption::Rocm => (GpuApi::Hip, GpuLibrarySelection::Rocm),
    };
    let libraries = options.libraries.as_ref();
    Some(GpuConfig {
        libraries: libraries.map_or(system, |paths| named_libraries(api, paths)),
        folders: options.library_folders.clone(),
        device: options.device_index,
        visibility: String::new(),
        cache_dir: options.kernel_cache.clone(),
        half_dtype: match options.dtype {
            DtypeOption::Float16 => HalfDtype::F16,
            DtypeOption::Bfloat16 | DtypeOption::Float32 => HalfDtype::BF16,
        },
        emulated_warp_size: libraries.and_then(|paths| paths.emulated_warp_size),
    })
}

fn named_libraries(api: GpuApi, paths: &LibraryPaths) -> GpuLibrarySelection {
    GpuLibrarySelection::Named {
        api,
        driver: paths.driver.clone(),
        rtc: paths.compiler.clone().unwrap_or_else(|| paths.driver.clone()),
        blas: paths.blas.clone(),
        collectives: paths.collectives.clone(),
    }
}
