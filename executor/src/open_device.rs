//! Opens the compute device of an executor, and maps configured dtypes to tensor dtypes.

use std::path::PathBuf;
use std::thread::available_parallelism;

use device::CpuConfig;
use device::gpu::{GpuApi, GpuConfig, GpuInventory, GpuLibrarySelection, HalfDtype};
use kernels::KernelBackend;
use kernels::cpu::CpuBackend;
use kernels::gpu::GpuBackend;
use ops::DType;
use protocol::{DeviceKind, DeviceLibraries, ExecutorSettings, KvCacheDtype, ModelDtype};

use crate::{DeviceEnvironment, ExecutorConfig, ExecutorError};

/// An opened device, and the number of host threads that prepare weights for it.
pub(crate) struct OpenedDevice {
    pub(crate) backend: KernelBackend,
    /// Number of threads that prepare weights for the device.
    pub(crate) threads: usize,
}

/// The device to open, and its options.
#[derive(Debug)]
pub(crate) struct DeviceOpenOptions<'a> {
    /// Kind of the device: CPU, CUDA or ROCm.
    pub(crate) device: DeviceKind,
    /// Paths of the driver libraries; `None` = the system libraries.
    pub(crate) libraries: Option<&'a DeviceLibraries>,
    /// Environment variables of GPU drivers.
    pub(crate) environment: &'a DeviceEnvironment,
    /// Index of the GPU; unused on the CPU.
    pub(crate) gpu: usize,
    /// Folder in which compiled GPU kernels are cached.
    pub(crate) kernel_cache: Option<&'a PathBuf>,
    /// Number of threads of the CPU device, or of threads that prepare weights for a GPU; `None` = number of
    /// cores.
    pub(crate) threads: Option<usize>,
    /// Element type of weights and activations.
    pub(crate) dtype: ModelDtype,
}

/// Opens the device that the settings of a rank select.
pub(crate) fn open(config: &ExecutorConfig) -> Result<OpenedDevice, ExecutorError> {
    let settings = &config.settings;
    // Position among the ranks of this host.
    let rank = usize::from(settings.rank.0 % settings.ranks_on_host.max(1));
    let threads = match settings.device {
        DeviceKind::Cpu => Some(cpu_threads(settings)),
        DeviceKind::Rocm | DeviceKind::Cuda => settings.threads.map(|n| n as usize),
    };
    open_device(&DeviceOpenOptions {
        device: settings.device,
        libraries: settings.libraries.as_ref(),
        environment: &config.environment,
        gpu: settings.gpus.get(rank).map_or(rank, |&gpu| gpu as usize),
        kernel_cache: settings.kernel_cache.as_ref(),
        threads,
        dtype: settings.dtype,
    })
}

/// Opens a device with the given options.
pub(crate) fn open_device(request: &DeviceOpenOptions<'_>) -> Result<OpenedDevice, ExecutorError> {
    let Some(config) = gpu_config(request) else {
        let threads = request.threads.unwrap_or(0);
        let device = CpuBackend::new(CpuConfig { threads, ..CpuConfig::default() })?;
        let threads = device.threads().threads();
        return Ok(OpenedDevice { backend: device.into(), threads });
    };
    let cores = available_parallelism().map_or(1, usize::from);
    let threads = request.threads.unwrap_or(cores);
    Ok(OpenedDevice { backend: GpuBackend::open(&config)?.into(), threads })
}

/// Returns the configuration of a GPU; `None` if the device is the CPU.
fn gpu_config(request: &DeviceOpenOptions<'_>) -> Option<GpuConfig> {
    let (api, system) = match request.device {
        DeviceKind::Cpu => return None,
        DeviceKind::Rocm => (GpuApi::Hip, GpuLibrarySelection::Rocm),
        DeviceKind::Cuda => (GpuApi::Cuda, GpuLibrarySelection::Cuda),
    };
    Some(GpuConfig {
        libraries: request.libraries.map_or(system, |named| named_libraries(api, named)),
        folders: request.environment.library_folders(request.device),
        device: request.gpu,
        visibility: request.environment.visibility(request.device),
        cache_dir: request.kernel_cache.cloned(),
        half_dtype: half_dtype(request.dtype),
        emulated_warp_size: request.libraries.and_then(|named| named.emulated_warp_size),
    })
}

/// Lists the GPUs of one vendor; returns `None` if `device` is the CPU. `libraries`: paths of the driver
/// libraries, `None` = the system libraries.
#[must_use]
pub fn survey_gpus(
    device: DeviceKind,
    libraries: Option<&DeviceLibraries>,
    environment: &DeviceEnvironment,
) -> Option<GpuInventory> {
    let request = DeviceOpenOptions {
        device,
        libraries,
        environment,
        gpu: 0,
        kernel_cache: None,
        threads: None,
        dtype: ModelDtype::Bfloat16,
    };
    gpu_config(&request).map(|config| GpuInventory::new(&config))
}

/// Number of CPU threads of this rank; 0 = one per core. By default, the cores of the host are divided
/// equally among its ranks.
fn cpu_threads(settings: &ExecutorSettings) -> usize {
    match (settings.threads, usize::from(settings.ranks_on_host)) {
        (Some(threads), _) => threads as usize,
        (None, 0 | 1) => 0,
        (None, ranks) => (available_parallelism().map_or(1, usize::from) / ranks).max(1),
    }
}

/// Returns the 16-bit type that the kernels are compiled for.
fn half_dtype(dtype: ModelDtype) -> HalfDtype {
    match dtype {
        ModelDtype::Float16 => HalfDtype::F16,
        ModelDtype::Bfloat16 | ModelDtype::Float32 => HalfDtype::BF16,
    }
}

fn named_libraries(api: GpuApi, named: &DeviceLibraries) -> GpuLibrarySelection {
    GpuLibrarySelection::Named {
        api,
        driver: named.driver.clone(),
        rtc: named.compiler.clone().unwrap_or_else(|| named.driver.clone()),
        blas: named.blas.clone(),
        collectives: named.collectives.clone(),
    }
}

/// Returns the element type of the KV cache of a model whose activations have type `dtype`.
pub(crate) fn kv_dtype(settings: &ExecutorSettings, dtype: DType) -> DType {
    match settings.kv_cache_dtype {
        KvCacheDtype::Auto => dtype,
        KvCacheDtype::Fp8 => DType::F8E4M3,
    }
}

/// Returns the element type of weights and activations.
pub(crate) fn dtype(settings: &ExecutorSettings) -> DType {
    element_type(settings.dtype)
}

/// Returns the tensor element type of a configured model type.
pub(crate) fn element_type(dtype: ModelDtype) -> DType {
    match dtype {
        ModelDtype::Bfloat16 => DType::BF16,
        ModelDtype::Float16 => DType::F16,
        ModelDtype::Float32 => DType::F32,
    }
}
