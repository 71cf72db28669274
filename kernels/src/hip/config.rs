//! What is opened, and how.

use std::path::PathBuf;

use hip_runtime_sys::{Api, Search};

use super::half::Half;

/// Which libraries serve as driver, run-time compiler, matrix library and way to other GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Libraries {
    /// AMD's, where ROCm or the system put them.
    Rocm,
    /// NVIDIA's.
    Cuda,
    /// These files.
    Named {
        /// Whose names they export.
        api: Api,
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
pub struct HipConfig {
    /// The libraries.
    pub libraries: Libraries,
    /// Folders to look for them before all others.
    pub folders: Vec<PathBuf>,
    /// Index of the device.
    pub device: usize,
    /// Folder of compiled kernels; `None` = compile at every start.
    pub cache_dir: Option<PathBuf>,
    /// The 16-bit type of weights, activations and pool: kernels are compiled for one.
    pub half: Half,
    /// The libraries are the SIMT emulator, with waves of so many lanes (64 or 32).
    pub emulated_wave: Option<u32>,
    /// Bytes of keys and values that latent attention makes at a time for rows of many tokens; `None`: it makes none, and takes the
    /// queries of these rows to the latents as those of others.
    pub expanded_bytes: Option<usize>,
}

/// Such bytes where nothing else is said.
const EXPANDED_BYTES: usize = 256 << 20;

impl Default for HipConfig {
    fn default() -> Self {
        Self {
            libraries: Libraries::Rocm,
            folders: Vec::new(),
            device: 0,
            cache_dir: None,
            half: Half::default(),
            emulated_wave: None,
            expanded_bytes: Some(EXPANDED_BYTES),
        }
    }
}

/// Where the libraries are looked for.
pub(super) struct Searches {
    pub(super) api: Api,
    pub(super) driver: Search,
    pub(super) rtc: Search,
    pub(super) blas: Option<Search>,
    pub(super) collectives: Option<Search>,
}

impl HipConfig {
    pub(super) fn searches(&self) -> Searches {
        let of = |api| Searches {
            api,
            driver: Search::driver(api, &self.folders),
            rtc: Search::rtc(api, &self.folders),
            blas: Some(Search::blaslt(api, &self.folders)),
            collectives: Some(Search::collectives(api, &self.folders)),
        };
        match &self.libraries {
            Libraries::Rocm => of(Api::Hip),
            Libraries::Cuda => of(Api::Cuda),
            Libraries::Named { api, driver, rtc, blas, collectives } => Searches {
                api: *api,
                driver: Search::named("driver", driver),
                rtc: Search::named("run-time compiler", rtc),
                blas: blas.as_ref().map(|path| Search::named("matrix library", path)),
                collectives: collectives
                    .as_ref()
                    .map(|path| Search::named("collective library", path)),
            },
        }
    }
}
