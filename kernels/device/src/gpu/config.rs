//! Configuration of a GPU device: libraries, device index, kernel cache and 16-bit type.

use std::path::PathBuf;

use hip_runtime_sys::{GpuApi, LibrarySearch};

use super::half_dtype::HalfDtype;

/// Libraries that serve as driver, run-time compiler, BLASLt library and collective library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuLibraries {
    /// AMD's libraries, in the folders of ROCm or the system.
    Rocm,
    /// NVIDIA's libraries.
    Cuda,
    /// Libraries at the given paths.
    Named {
        /// API that the libraries export.
        api: GpuApi,
        /// Path of the driver.
        driver: PathBuf,
        /// Path of the run-time compiler, which may be the driver itself.
        rtc: PathBuf,
        /// Path of the BLASLt library, if any.
        blas: Option<PathBuf>,
        /// Path of RCCL or NCCL, if any.
        collectives: Option<PathBuf>,
    },
}

/// Configuration of a GPU device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuConfig {
    /// Runtime libraries.
    pub libraries: GpuLibraries,
    /// Folders that are searched first for the libraries.
    pub folders: Vec<PathBuf>,
    /// Index of the device.
    pub device: usize,
    /// Folder of the cache of compiled kernels; `None` = compile at every start.
    pub cache_dir: Option<PathBuf>,
    /// 16-bit type of weights, activations and KV cache, for which kernels are compiled.
    pub half_dtype: HalfDtype,
    /// Warp size (32 or 64 lanes) if the libraries are the SIMT emulator; `None` for a real GPU.
    pub emulated_warp_size: Option<u32>,
}

impl Default for GpuConfig {
    fn default() -> Self {
        Self {
            libraries: GpuLibraries::Rocm,
            folders: Vec::new(),
            device: 0,
            cache_dir: None,
            half_dtype: HalfDtype::default(),
            emulated_warp_size: None,
        }
    }
}

/// Library searches of a configuration.
pub struct LibrarySearches {
    pub api: GpuApi,
    pub driver: LibrarySearch,
    pub rtc: LibrarySearch,
    pub blas: Option<LibrarySearch>,
    pub collectives: Option<LibrarySearch>,
}

impl GpuConfig {
    /// Returns the searches for the configured libraries.
    pub fn searches(&self) -> LibrarySearches {
        let searches_of = |api| LibrarySearches {
            api,
            driver: LibrarySearch::driver(api, &self.folders),
            rtc: LibrarySearch::rtc(api, &self.folders),
            blas: Some(LibrarySearch::blaslt(api, &self.folders)),
            collectives: Some(LibrarySearch::collectives(api, &self.folders)),
        };
        match &self.libraries {
            GpuLibraries::Rocm => searches_of(GpuApi::Hip),
            GpuLibraries::Cuda => searches_of(GpuApi::Cuda),
            GpuLibraries::Named { api, driver, rtc, blas, collectives } => LibrarySearches {
                api: *api,
                driver: LibrarySearch::named("driver", driver),
                rtc: LibrarySearch::named("run-time compiler", rtc),
                blas: blas.as_ref().map(|path| LibrarySearch::named("BLASLt library", path)),
                collectives: collectives
                    .as_ref()
                    .map(|path| LibrarySearch::named("collective library", path)),
            },
        }
    }
}
