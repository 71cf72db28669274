//! What is opened, and how.

use std::path::PathBuf;

use hip_runtime_sys::{GpuApi, LibrarySearch};

use super::half_dtype::HalfDtype;

/// Which libraries serve as driver, run-time compiler, matrix library and way to other GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuLibraries {
    /// AMD's, where ROCm or the system put them.
    Rocm,
    /// NVIDIA's.
    Cuda,
    /// These files.
    Named {
        /// Whose names they export.
        api: GpuApi,
        /// The driver.
        driver: PathBuf,
        /// The run-time compiler; often the driver's own file.
        rtc: PathBuf,
        /// The matrix library, if there is one.
        blas: Option<PathBuf>,
        /// RCCL or NCCL, if there is one.
        collectives: Option<PathBuf>,
    },
}

/// How a GPU is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuConfig {
    /// The libraries.
    pub libraries: GpuLibraries,
    /// Folders to look for them before all others.
    pub folders: Vec<PathBuf>,
    /// Index of the device.
    pub device: usize,
    /// Folder of compiled kernels; `None` = compile at every start.
    pub cache_dir: Option<PathBuf>,
    /// The 16-bit type of weights, activations and pool: kernels are compiled for one.
    pub half_dtype: HalfDtype,
    /// The libraries are the SIMT emulator, with waves of so many lanes (64 or 32).
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

/// Where the libraries are looked for.
pub struct LibrarySearches {
    pub api: GpuApi,
    pub driver: LibrarySearch,
    pub rtc: LibrarySearch,
    pub blas: Option<LibrarySearch>,
    pub collectives: Option<LibrarySearch>,
}

impl GpuConfig {
    /// The libraries to open.
    pub fn searches(&self) -> LibrarySearches {
        let of = |api| LibrarySearches {
            api,
            driver: LibrarySearch::driver(api, &self.folders),
            rtc: LibrarySearch::rtc(api, &self.folders),
            blas: Some(LibrarySearch::blaslt(api, &self.folders)),
            collectives: Some(LibrarySearch::collectives(api, &self.folders)),
        };
        match &self.libraries {
            GpuLibraries::Rocm => of(GpuApi::Hip),
            GpuLibraries::Cuda => of(GpuApi::Cuda),
            GpuLibraries::Named { api, driver, rtc, blas, collectives } => LibrarySearches {
                api: *api,
                driver: LibrarySearch::named("driver", driver),
                rtc: LibrarySearch::named("run-time compiler", rtc),
                blas: blas.as_ref().map(|path| LibrarySearch::named("matrix library", path)),
                collectives: collectives
                    .as_ref()
                    .map(|path| LibrarySearch::named("collective library", path)),
            },
        }
    }
}
