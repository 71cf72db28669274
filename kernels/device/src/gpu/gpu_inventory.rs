//! Inventory of the GPUs of a machine: which libraries are found, which devices the driver lists, and by which
//! links they access each other's memory. Creating the inventory never fails; errors are part of the result.

use std::ffi::c_int;
use std::path::PathBuf;

use hip_runtime_sys::{
    BlasLtApi, DriverApi, LibraryOpenError, LibrarySearchPaths, RtcApi, SharedLibrary, code,
};

use super::card::GpuProductSpec;
use super::config::{GpuConfig, GpuLibraryPaths};
use super::gpu_runtime::GpuRuntime;
use super::peer_link::PeerLink;

/// Role of a GPU runtime library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LibraryRole {
    /// Driver: memory, launches, graphs.
    Driver,
    /// Run-time compiler of kernels.
    Compiler,
    /// Matrix multiplication: hipBLASLt or cuBLASLt.
    Blas,
    /// Collective operations between ranks: RCCL or NCCL.
    Collectives,
}

/// Result of searching for one library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LibrarySearchResult {
    /// Role of the library.
    pub role: LibraryRole,
    /// Path and version of the library, or the reason why it could not be opened.
    pub found: Result<FoundLibrary, LibraryOpenError>,
}

/// Library that was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundLibrary {
    /// Path or file name from which the library was opened.
    pub path: PathBuf,
    /// Version number that the library reports; `None` if it does not report one.
    pub version: Option<String>,
}

/// Device that a driver lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedGpu {
    /// Index of the device in the device list of the driver.
    pub index: usize,
    /// Product name; empty if the driver does not report one.
    pub name: String,
    /// Architecture, for example `gfx942` or `sm_90a`.
    pub arch: String,
    /// Number of SMs or compute units.
    pub multiprocessors: u32,
    /// Number of lanes of a warp or wavefront.
    pub warp_size: u32,
    /// Maximum shared memory per thread block, in bytes.
    pub shared_bytes: u32,
    /// Size of the last-level cache in bytes; 0 if it is unknown.
    pub last_level_cache_bytes: u64,
    /// Free memory in bytes.
    pub free_bytes: u64,
    /// Total memory in bytes.
    pub total_bytes: u64,
    /// Whether the GPU and the host CPU share the same memory.
    pub has_unified_memory: bool,
    /// GPU model; `None` if it is unknown.
    pub card: Option<GpuProductSpec>,
    /// PCI address, such as `0000:c1:00.0`.
    pub pci_bus_id: Option<String>,
    /// Links to all other devices of the inventory.
    pub links: Vec<PeerLink>,
}

/// GPUs and libraries of one vendor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInventory {
    /// Libraries that are searched for, found or not.
    pub libraries: Vec<LibrarySearchResult>,
    /// Devices that the driver lists and that could be opened.
    pub devices: Vec<ListedGpu>,
    /// Reasons why the driver or a device could not be opened.
    pub errors: Vec<String>,
}

impl GpuInventory {
    /// Lists the GPUs and libraries of a machine; `config` selects the libraries. The device index of
    /// `config` is ignored.
    #[must_use]
    pub fn new(config: &GpuConfig) -> Self {
        let searches = config.searches();
        let libraries = probe_libraries(&searches);
        let (mut devices, mut errors) = (Vec::new(), Vec::new());
        // If the driver cannot be opened, the error is in `libraries`.
        let driver = DriverApi::open(searches.api, &searches.driver).ok();
        for index in 0..driver.as_ref().map_or(0, device_count) {
            match open_device(config, &searches, index) {
                Ok(device) => devices.push(device),
                Err(error) => errors.push(format!("device {index}: {error}")),
            }
        }
        let mut survey = Self { libraries, devices, errors };
        if let Some(driver) = &driver {
            if survey.devices.is_empty() && survey.errors.is_empty() {
                survey.errors.push(no_device_error(driver, config));
            }
            survey.find_links(driver);
        }
        survey
    }

    /// Whether a library of this role was found.
    #[must_use]
    pub fn has(&self, role: LibraryRole) -> bool {
        self.libraries.iter().any(|library| library.role == role && library.found.is_ok())
    }

    fn find_links(&mut self, driver: &DriverApi) {
        let indices: Vec<usize> = self.devices.iter().map(|device| device.index).collect();
        for device in &mut self.devices {
            let others = indices.iter().filter(|&&peer| peer != device.index);
            let link = |&peer: &usize| PeerLink::query(driver, device.index, peer);
            device.links = others.map(link).collect();
        }
    }
}

fn probe_libraries(searches: &GpuLibraryPaths) -> Vec<LibrarySearchResult> {
    let api = searches.api;
    let driver = DriverApi::open(api, &searches.driver)
        .map(|driver| FoundLibrary { version: driver_version(&driver), path: driver.library });
    let compiler = RtcApi::open(api, &searches.rtc)
        .map(|rtc| FoundLibrary { version: compiler_version(&rtc), path: rtc.library });
    let mut probes = vec![
        LibrarySearchResult { role: LibraryRole::Driver, found: driver },
        LibrarySearchResult { role: LibraryRole::Compiler, found: compiler },
    ];
    if let Some(search) = &searches.blas {
        let found = BlasLtApi::open(api, search)
            .map(|blas| FoundLibrary { version: blas_version(&blas), path: blas.library });
        probes.push(LibrarySearchResult { role: LibraryRole::Blas, found });
    }
    if let Some(search) = &searches.collectives {
        let found = open_collectives(search);
        probes.push(LibrarySearchResult { role: LibraryRole::Collectives, found });
    }
    probes
}

fn driver_version(driver: &DriverApi) -> Option<String> {
    let mut version: c_int = 0;
    let get = driver.driver_version?;
    // SAFETY: the output pointer is valid for writes.
    let status = unsafe { get(&raw mut version) };
    (status == code::SUCCESS).then(|| match driver.api {
        // HIP encodes version 7.1.25424 as 70125424; CUDA encodes version 13.0 as 13000.
        hip_runtime_sys::GpuApi::Hip => {
            format!("{}.{}.{}", version / 10_000_000, version / 100_000 % 100, version % 100_000)
        }
        hip_runtime_sys::GpuApi::Cuda => format!("{}.{}", version / 1000, version % 1000 / 10),
    })
}

fn compiler_version(rtc: &RtcApi) -> Option<String> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both output pointers are valid for writes.
    let status = unsafe { (rtc.version)(&raw mut major, &raw mut minor) };
    (status == 0).then(|| format!("{major}.{minor}"))
}

fn blas_version(blas: &BlasLtApi) -> Option<String> {
    // SAFETY: the function takes no arguments.
    blas.cuda_version.map(|version| unsafe { version() }.to_string())
}

fn open_collectives(search: &LibrarySearchPaths) -> Result<FoundLibrary, LibraryOpenError> {
    /// Type of the function `ncclGetVersion`.
    type NcclGetVersionFn = unsafe extern "C" fn(*mut c_int) -> c_int;
    let library = SharedLibrary::open(search)?;
    // SAFETY: RCCL and NCCL have the same function with this type.
    let get = unsafe { library.symbol::<NcclGetVersionFn>("ncclGetVersion") }?;
    let mut version: c_int = 0;
    // SAFETY: the output pointer is valid for writes.
    let status = unsafe { get(&raw mut version) };
    let version = (status == 0)
        .then(|| format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100));
    Ok(FoundLibrary { path: library.path().to_owned(), version })
}

/// Returns the number of devices; 0 if the driver lists none or fails.
fn device_count(driver: &DriverApi) -> usize {
    let mut count: c_int = 0;
    // SAFETY: initialisation may be repeated; the output pointer is valid for writes.
    let found = unsafe {
        (driver.init)(0) == code::SUCCESS && (driver.device_count)(&raw mut count) == code::SUCCESS
    };
    if found { count.max(0) as usize } else { 0 }
}

fn no_device_error(driver: &DriverApi, config: &GpuConfig) -> String {
    let library = driver.library.display();
    match config.visibility.as_str() {
        "" => format!("{library} finds no device"),
        variables => format!("{library} finds no device with {variables}"),
    }
}

fn open_device(
    config: &GpuConfig,
    searches: &GpuLibraryPaths,
    index: usize,
) -> Result<ListedGpu, super::GpuError> {
    let runtime = GpuRuntime::open(&GpuConfig { device: index, ..config.clone() }, searches)?;
    let (free_bytes, total_bytes) = runtime.mem_info();
    let properties = &runtime.properties;
    Ok(ListedGpu {
        index,
        name: properties.name.clone(),
        arch: properties.arch.clone(),
        multiprocessors: properties.multiprocessors,
        warp_size: properties.warp_size,
        shared_bytes: properties.shared_bytes,
        last_level_cache_bytes: properties.last_level_cache_bytes,
        free_bytes,
        total_bytes,
        has_unified_memory: properties.has_unified_memory,
        card: GpuProductSpec::of_name(&properties.name).copied(),
        pci_bus_id: runtime.pci_bus_id(),
        links: Vec::new(),
    })
}
