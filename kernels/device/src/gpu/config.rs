//! Configuration of a GPU device: runtime libraries, device index, kernel cache and 16-bit data type.

use std::path::PathBuf;

use hip_runtime_sys::{GpuApi, LibrarySearchPaths};

use super::half_dtype::HalfDtype;

/// Selects the driver, run-time compiler, BLASLt library and collective library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuLibrarySelection {
    /// AMD libraries, in the ROCm folders or in the search path of the dynamic loader.
    Rocm,
    /// NVIDIA libraries, in the search path of the dynamic loader.
    Cuda,
    /// Libraries at the paths given in the fields.
    Named {
        /// API that the libraries export.
        api: GpuApi,
        /// Path of the driver.
        driver: PathBuf,
        /// Path of the run-time compiler, which may be the driver itself.
        rtc: PathBuf,
        /// Path of the BLASLt library; `None` = the device has no BLASLt library.
        blas: Option<PathBuf>,
        /// Path of RCCL or NCCL; `None` = the device has no collective library.
        collectives: Option<PathBuf>,
    },
}

/// Configuration of a GPU device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuConfig {
    /// Runtime libraries of the device.
    pub libraries: GpuLibrarySelection,
    /// Folders that are searched for libraries first.
    pub folders: Vec<PathBuf>,
    /// Index of the GPU among the devices that the driver lists.
    pub device: usize,
    /// Environment variables that restrict which GPUs the driver lists, with their values, for error
    /// messages; empty if there are none.
    pub visibility: String,
    /// Folder in which compiled kernels are cached; `None` = kernels are compiled at every start.
    pub cache_dir: Option<PathBuf>,
    /// 16-bit data type of weights, activations and KV cache, for which kernels are compiled.
    pub half_dtype: HalfDtype,
    /// Number of lanes per warp (32 or 64) if the libraries are the SIMT emulator; `None` for a real GPU.
    pub emulated_warp_size: Option<u32>,
}

impl Default for GpuConfig {
    fn default() -> Self {
        Self {
            libraries: GpuLibrarySelection::Rocm,
            folders: Vec::new(),
            device: 0,
            visibility: String::new(),
            cache_dir: None,
            half_dtype: HalfDtype::default(),
            emulated_warp_size: None,
        }
    }
}

/// Search paths of all runtime libraries of a device.
pub struct GpuLibraryPaths {
    pub api: GpuApi,
    pub driver: LibrarySearchPaths,
    pub rtc: LibrarySearchPaths,
    pub blas: Option<LibrarySearchPaths>,
    pub collectives: Option<LibrarySearchPaths>,
}

impl GpuConfig {
    /// Returns the search paths of the configured libraries.
    pub fn searches(&self) -> GpuLibraryPaths {
        let searches_of = |api| GpuLibraryPaths {
            api,
            driver: LibrarySearchPaths::driver(api, &self.folders),
            rtc: LibrarySearchPaths::rtc(api, &self.folders),
            blas: Some(LibrarySearchPaths::blaslt(api, &self.folders)),
            collectives: Some(LibrarySearchPaths::collectives(api, &self.folders)),
        };
        match &self.libraries {
            GpuLibrarySelection::Rocm => searches_of(GpuApi::Hip),
            GpuLibrarySelection::Cuda => searches_of(GpuApi::Cuda),
            GpuLibrarySelection::Named { api, driver, rtc, blas, collectives } => GpuLibraryPaths {
                api: *api,
                driver: LibrarySearchPaths::named("driver", driver),
                rtc: LibrarySearchPaths::named("run-time compiler", rtc),
                blas: blas.as_ref().map(|path| LibrarySearchPaths::named("BLASLt library", path)),
                collectives: collectives
                    .as_ref()
                    .map(|path| LibrarySearchPaths::named("collective library", path)),
            },
        }
    }
}
