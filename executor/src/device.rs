//! Opens what an executor computes on.

use crate::ExecutorError;
use kernels::Kernels;
use kernels::cpu::{CpuConfig, CpuDevice};
use kernels::hip::{Api, Half, HipConfig, HipDevice, Libraries};
use ops::DType;
use protocol::{Device, DeviceLibraries, Dtype, KvDtype, Settings};
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

/// Opens the device of a rank.
pub(crate) fn open(settings: &Settings) -> Result<Opened, ExecutorError> {
    let (api, system) = match settings.device {
        Device::Cpu => {
            let threads = cpu_threads(settings);
            let device = CpuDevice::new(CpuConfig { threads, ..CpuConfig::default() })?;
            let threads = device.threads().threads();
            return Ok(Opened { kernels: Arc::new(device), gpu: None, threads });
        }
        Device::Rocm => (Api::Hip, Libraries::Rocm),
        Device::Cuda => (Api::Cuda, Libraries::Cuda),
    };
    let libraries = settings.libraries.as_ref();
    let rank = usize::from(settings.rank.0);
    let hip = HipConfig {
        libraries: libraries.map_or(system, |named| named_libraries(api, named)),
        folders: Vec::new(),
        device: settings.gpus.get(rank).map_or(rank, |&gpu| gpu as usize),
        cache_dir: settings.kernel_cache.clone(),
        half: half(settings.dtype),
        emulated_wave: libraries.and_then(|named| named.emulated_wave),
        ..HipConfig::default()
    };
    let cores = available_parallelism().map_or(1, usize::from);
    let gpu = Arc::new(HipDevice::open(&hip)?);
    let threads = settings.threads.map_or(cores, |n| n as usize);
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
    match settings.dtype {
        Dtype::Bfloat16 => DType::BF16,
        Dtype::Float16 => DType::F16,
        Dtype::Float32 => DType::F32,
    }
}
