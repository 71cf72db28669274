//! Opens what an executor computes on.

use crate::ExecutorError;
use kernels::Kernels;
use kernels::cpu::{CpuConfig, CpuDevice};
use kernels::hip::{Api, Half, HipConfig, HipDevice, Libraries};
use ops::DType;
use protocol::{Device, DeviceLibraries, Dtype, KvDtype, Settings};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::available_parallelism;

/// What an executor computes on.
pub(crate) struct Opened {
    pub(crate) kernels: Arc<dyn Kernels>,
    /// The same, if it is a GPU.
    pub(crate) gpu: Option<Arc<HipDevice>>,
    /// Threads that may prepare what it is given.
    pub(crate) threads: usize,
}

/// Which device to open, and how.
#[derive(Debug)]
pub(crate) struct DeviceRequest<'a> {
    /// Kind of device.
    pub(crate) device: Device,
    /// Driver libraries by path; `None` = those of the system.
    pub(crate) libraries: Option<&'a DeviceLibraries>,
    /// Index of the GPU.
    pub(crate) gpu: usize,
    /// Folder of compiled GPU kernels.
    pub(crate) kernel_cache: Option<&'a PathBuf>,
    /// Threads of the CPU device, or those that prepare what a GPU gets; `None` = as many as there are cores.
    pub(crate) threads: Option<usize>,
    /// Type of weights and activations.
    pub(crate) dtype: Dtype,
}

/// Opens the device of a rank.
pub(crate) fn open(settings: &Settings) -> Result<Opened, ExecutorError> {
    let rank = usize::from(settings.rank.0);
    let threads = match settings.device {
        Device::Cpu => Some(cpu_threads(settings)),
        Device::Rocm | Device::Cuda => settings.threads.map(|n| n as usize),
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
pub(crate) fn open_device(request: &DeviceRequest<'_>) -> Result<Opened, ExecutorError> {
    let (api, system) = match request.device {
        Device::Cpu => {
            let threads = request.threads.unwrap_or(0);
            let device = CpuDevice::new(CpuConfig { threads, ..CpuConfig::default() })?;
            let threads = device.threads().threads();
            return Ok(Opened { kernels: Arc::new(device), gpu: None, threads });
        }
        Device::Rocm => (Api::Hip, Libraries::Rocm),
        Device::Cuda => (Api::Cuda, Libraries::Cuda),
    };
    let hip = HipConfig {
        libraries: request.libraries.map_or(system, |named| named_libraries(api, named)),
        folders: Vec::new(),
        device: request.gpu,
        cache_dir: request.kernel_cache.cloned(),
        half: half(request.dtype),
        emulated_wave: request.libraries.and_then(|named| named.emulated_wave),
        ..HipConfig::default()
    };
    let cores = available_parallelism().map_or(1, usize::from);
    let gpu = Arc::new(HipDevice::open(&hip)?);
    let threads = request.threads.unwrap_or(cores);
    Ok(Opened { kernels: gpu.clone(), gpu: Some(gpu), threads })
}

/// Threads of this rank, 0 = one per core: ranks of one host share its cores unless told otherwise.
fn cpu_threads(settings: &Settings) -> usize {
    match (settings.threads, usize::from(settings.host_ranks)) {
        (Some(threads), _) => threads as usize,
        (None, 0 | 1) => 0,
        (None, ranks) => (available_parallelism().map_or(1, usize::from) / ranks).max(1),
    }
}

/// The 16-bit type that kernels are compiled for.
fn half(dtype: Dtype) -> Half {
    match dtype {
        Dtype::Float16 => Half::F16,
        Dtype::Bfloat16 | Dtype::Float32 => Half::BF16,
    }
}

fn named_libraries(api: Api, named: &DeviceLibraries) -> Libraries {
    Libraries::Named {
        api,
        driver: named.driver.clone(),
        rtc: named.compiler.clone().unwrap_or_else(|| named.driver.clone()),
        blas: named.blas.clone(),
        collectives: named.collectives.clone(),
    }
}

/// Type of the KV cache of a model in `dtype`.
pub(crate) fn kv_dtype(settings: &Settings, dtype: DType) -> DType {
    match settings.kv_dtype {
        KvDtype::Auto => dtype,
        KvDtype::Fp8 => DType::F8E4M3,
    }
}

/// Type of weights and activations.
pub(crate) fn dtype(settings: &Settings) -> DType {
    element_type(settings.dtype)
}

/// The element type of tensors in a type that a setting names.
pub(crate) fn element_type(dtype: Dtype) -> DType {
    match dtype {
        Dtype::Bfloat16 => DType::BF16,
        Dtype::Float16 => DType::F16,
        Dtype::Float32 => DType::F32,
    }
}
