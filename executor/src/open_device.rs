//! Opening of the device of an executor.

use std::path::PathBuf;
use std::thread::available_parallelism;

use device::CpuConfig;
use device::gpu::{GpuApi, GpuConfig, GpuLibraries, HalfDtype};
use kernels::KernelBackend;
use kernels::cpu::CpuBackend;
use kernels::gpu::GpuBackend;
use ops::DType;
use protocol::{DeviceKind, DeviceLibraries, ExecutorSettings, KvCacheDtype, ModelDtype};

use crate::ExecutorError;

/// The device of an executor.
pub(crate) struct OpenedDevice {
    pub(crate) backend: KernelBackend,
    /// Threads that prepare weights for the device.
    pub(crate) threads: usize,
}

/// Device to open, and its options.
#[derive(Debug)]
pub(crate) struct DeviceRequest<'a> {
    /// Kind of device.
    pub(crate) device: DeviceKind,
    /// Driver libraries by path; `None` = those of the system.
    pub(crate) libraries: Option<&'a DeviceLibraries>,
    /// Index of the GPU.
    pub(crate) gpu: usize,
    /// Folder of compiled GPU kernels.
    pub(crate) kernel_cache: Option<&'a PathBuf>,
    /// Threads of the CPU device, or threads that prepare weights for a GPU; `None` = number of cores.
    pub(crate) threads: Option<usize>,
    /// Type of weights and activations.
    pub(crate) dtype: ModelDtype,
}

/// Opens the device of a rank.
pub(crate) fn open(settings: &ExecutorSettings) -> Result<OpenedDevice, ExecutorError> {
    let rank = usize::from(settings.rank.0);
    let threads = match settings.device {
        DeviceKind::Cpu => Some(cpu_threads(settings)),
        DeviceKind::Rocm | DeviceKind::Cuda => settings.threads.map(|n| n as usize),
    };
    open_device(&DeviceRequest {
        device: settings.device,
        libraries: settings.libraries.as_ref(),
        gpu: settings.gpus.get(rank).map_or(rank, |&gpu| gpu as usize),
        kernel_cache: settings.kernel_cache.as_ref(),
        threads,
        dtype: settings.dtype,
    })
}

/// Opens a device.
pub(crate) fn open_device(request: &DeviceRequest<'_>) -> Result<OpenedDevice, ExecutorError> {
    let (api, system) = match request.device {
        DeviceKind::Cpu => {
            let threads = request.threads.unwrap_or(0);
            let device = CpuBackend::new(CpuConfig { threads, ..CpuConfig::default() })?;
            let threads = device.threads().threads();
            return Ok(OpenedDevice { backend: device.into(), threads });
        }
        DeviceKind::Rocm => (GpuApi::Hip, GpuLibraries::Rocm),
        DeviceKind::Cuda => (GpuApi::Cuda, GpuLibraries::Cuda),
    };
    let config = GpuConfig {
        libraries: request.libraries.map_or(system, |named| named_libraries(api, named)),
        folders: Vec::new(),
        device: request.gpu,
        cache_dir: request.kernel_cache.cloned(),
        half_dtype: half_dtype(request.dtype),
        emulated_warp_size: request.libraries.and_then(|named| named.emulated_warp_size),
    };
    let cores = available_parallelism().map_or(1, usize::from);
    let threads = request.threads.unwrap_or(cores);
    Ok(OpenedDevice { backend: GpuBackend::open(&config)?.into(), threads })
}

/// Threads of this rank, 0 = one per core: by default the ranks of one host share its cores.
fn cpu_threads(settings: &ExecutorSettings) -> usize {
    match (settings.threads, usize::from(settings.ranks_on_host)) {
        (Some(threads), _) => threads as usize,
        (None, 0 | 1) => 0,
        (None, ranks) => (available_parallelism().map_or(1, usize::from) / ranks).max(1),
    }
}

/// The 16-bit type that kernels are compiled for.
fn half_dtype(dtype: ModelDtype) -> HalfDtype {
    match dtype {
        ModelDtype::Float16 => HalfDtype::F16,
        ModelDtype::Bfloat16 | ModelDtype::Float32 => HalfDtype::BF16,
    }
}

fn named_libraries(api: GpuApi, named: &DeviceLibraries) -> GpuLibraries {
    GpuLibraries::Named {
        api,
        driver: named.driver.clone(),
        rtc: named.compiler.clone().unwrap_or_else(|| named.driver.clone()),
        blas: named.blas.clone(),
        collectives: named.collectives.clone(),
    }
}

/// Type of the KV cache of a model in `dtype`.
pub(crate) fn kv_dtype(settings: &ExecutorSettings, dtype: DType) -> DType {
    match settings.kv_cache_dtype {
        KvCacheDtype::Auto => dtype,
        KvCacheDtype::Fp8 => DType::F8E4M3,
    }
}

/// Type of weights and activations.
pub(crate) fn dtype(settings: &ExecutorSettings) -> DType {
    element_type(settings.dtype)
}

/// Element type of tensors for a configured model type.
pub(crate) fn element_type(dtype: ModelDtype) -> DType {
    match dtype {
        ModelDtype::Bfloat16 => DType::BF16,
        ModelDtype::Float16 => DType::F16,
        ModelDtype::Float32 => DType::F32,
    }
}
