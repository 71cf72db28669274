//! Data structures of the report, which are also serialised as its JSON form.

use std::path::PathBuf;

use serde::Serialize;

/// Everything that `hadron doctor` finds out about a machine.
#[derive(Debug, Clone, Serialize)]
pub(super) struct DoctorReport {
    /// Version of Hadron.
    pub(super) version: String,
    /// `release`, or `development` if debug assertions are compiled in.
    pub(super) build: String,
    /// Device with which `hadron serve` would start: `cpu`, `rocm` or `cuda`.
    pub(super) device: String,
    /// Whether `hadron serve` can start with this device.
    pub(super) can_serve: bool,
    /// Host.
    pub(super) host: HostReport,
    /// Cache of compiled kernels; `None` if there is no folder for it.
    pub(super) kernel_cache: Option<KernelCacheReport>,
    /// GPUs and libraries by vendor.
    pub(super) gpus: Vec<GpuVendorReport>,
    /// Problems that prevent serving or make it slow, and what is not known about such a machine.
    pub(super) findings: Vec<DoctorFinding>,
}

/// Host: kernel, processors, memory and limits. Unknown numbers are `None`.
#[derive(Debug, Clone, Serialize)]
pub(super) struct HostReport {
    /// Release of the Linux kernel.
    pub(super) kernel: Option<String>,
    /// Model name of the processor.
    pub(super) cpu: Option<String>,
    /// Number of physical cores that the process may use.
    pub(super) cores: usize,
    /// Number of NUMA nodes.
    pub(super) numa_nodes: Option<usize>,
    /// Whether automatic NUMA balancing is enabled: the kernel migrates pages between NUMA nodes, which
    /// interrupts GPUs.
    pub(super) numa_balancing: Option<bool>,
    /// Total memory in bytes.
    pub(super) memory_bytes: Option<u64>,
    /// Memory in bytes that processes can still allocate.
    pub(super) available_bytes: Option<u64>,
    /// Total and free bytes of `/dev/shm`.
    pub(super) shared_memory: Option<VolumeReport>,
    /// Limit of locked memory in bytes; `None` = no limit.
    pub(super) memlock_bytes: Option<u64>,
    /// Hard limit of open files; `None` = no limit.
    pub(super) open_files: Option<u64>,
}

/// Size of a file system.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct VolumeReport {
    /// Total size in bytes.
    pub(super) total_bytes: u64,
    /// Bytes that an unprivileged process can allocate.
    pub(super) free_bytes: u64,
}

/// Cache of compiled kernels.
#[derive(Debug, Clone, Serialize)]
pub(super) struct KernelCacheReport {
    /// Folder of the cache.
    pub(super) folder: PathBuf,
    /// Number of cached kernel images.
    pub(super) images: usize,
    /// Size of the images in bytes.
    pub(super) bytes: u64,
    /// Whether a file can be created in the folder.
    pub(super) is_writable: bool,
}

/// Libraries and devices of one vendor.
#[derive(Debug, Clone, Serialize)]
pub(super) struct GpuVendorReport {
    /// Value of `--device` for this vendor: `rocm` or `cuda`.
    pub(super) device: String,
    /// Device file of the kernel driver.
    pub(super) device_file: DeviceFileReport,
    /// Variables that restrict the visible devices, such as `HIP_VISIBLE_DEVICES=0,1`; empty = none.
    pub(super) visibility: String,
    /// Libraries, found or not.
    pub(super) libraries: Vec<LibraryReport>,
    /// Devices that the driver lists.
    pub(super) devices: Vec<GpuReport>,
    /// Reasons why the driver or a device could not be opened.
    pub(super) errors: Vec<String>,
}

/// Device file of a kernel driver.
#[derive(Debug, Clone, Serialize)]
pub(super) struct DeviceFileReport {
    /// Path of the file.
    pub(super) path: PathBuf,
    /// Whether the file exists.
    pub(super) exists: bool,
    /// Error of opening the file for reading and writing, if it exists.
    pub(super) error: Option<String>,
}

/// Library of a GPU runtime.
#[derive(Debug, Clone, Serialize)]
pub(super) struct LibraryReport {
    /// `driver`, `compiler`, `blas` or `collectives`.
    pub(super) role: &'static str,
    /// Path or name with which the library was opened; `None` if the library was not found.
    pub(super) path: Option<PathBuf>,
    /// Version that it reports.
    pub(super) version: Option<String>,
    /// Reason why the library was not opened, with the paths that were tried.
    pub(super) error: Option<String>,
}

/// One GPU.
#[derive(Debug, Clone, Serialize)]
pub(super) struct GpuReport {
    /// Index among the devices that the driver lists, as in `--device-ids`.
    pub(super) index: usize,
    /// Product name.
    pub(super) name: String,
    /// Architecture, for example `gfx942`.
    pub(super) arch: String,
    /// Number of SMs or compute units.
    pub(super) multiprocessors: u32,
    /// Number of compute units of the whole card; `None` if the card is not known.
    pub(super) card_compute_units: Option<u32>,
    /// Number of lanes of a warp or wavefront.
    pub(super) warp_size: u32,
    /// Maximum shared memory (LDS) per thread block, in bytes.
    pub(super) shared_bytes: u32,
    /// Size of the last-level cache in bytes; 0 if it is not known.
    pub(super) last_level_cache_bytes: u64,
    /// Total memory in bytes.
    pub(super) memory_bytes: u64,
    /// Free memory in bytes.
    pub(super) free_bytes: u64,
    /// Whether GPU and host share one memory.
    pub(super) has_unified_memory: bool,
    /// Indices of the devices whose memory this GPU can access.
    pub(super) peers: Vec<usize>,
    /// Links to all other devices of the vendor.
    pub(super) links: Vec<PeerLinkReport>,
    /// PCI address.
    pub(super) pci_bus_id: Option<String>,
    /// PCIe link to the host.
    pub(super) pcie: Option<PcieLink>,
    /// NUMA node to which the GPU is attached.
    pub(super) numa_node: Option<i32>,
}

/// Link from a GPU to another GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct PeerLinkReport {
    /// Index of the other GPU.
    pub(super) peer: usize,
    /// Whether the GPU can access the memory of the other GPU.
    pub(super) has_access: bool,
    /// Kind of the link.
    pub(super) kind: LinkKindReport,
    /// Number of hops; `None` if the driver does not report it.
    pub(super) hops: Option<u32>,
    /// Performance rank among the links of NVIDIA GPUs, 0 for the fastest kind; `None` if the driver does not
    /// report it.
    pub(super) performance_rank: Option<u32>,
}

/// Kind of a link between GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum LinkKindReport {
    /// xGMI, between AMD GPUs.
    Xgmi,
    /// NVLink, between NVIDIA GPUs.
    NvLink,
    /// PCIe.
    Pcie,
    /// The driver does not report the kind.
    Unknown,
}

/// PCIe link of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct PcieLink {
    /// Number of lanes in use.
    pub(super) width: u32,
    /// Number of lanes that the GPU has.
    pub(super) max_width: u32,
    /// Speed per lane in million transfers per second; `None` if it is not known.
    pub(super) speed_mt_s: Option<u32>,
    /// Maximum speed per lane of the GPU in million transfers per second; `None` if it is not known.
    pub(super) max_speed_mt_s: Option<u32>,
}

/// A problem that prevents serving or makes it slow, or something to know about this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct DoctorFinding {
    /// Severity.
    pub(super) level: FindingSeverity,
    /// What was found, and its effect.
    pub(super) what: String,
    /// What to do.
    pub(super) remedy: String,
}

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum FindingSeverity {
    /// The server does not start.
    Error,
    /// The server is slow, or lacks a function.
    Warning,
    /// Nothing has to be changed.
    Note,
}
