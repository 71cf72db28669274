//! GPUs and libraries of each vendor.

use std::fs::OpenOptions;
use std::path::Path;

use executor::{
    GpuInventory, LibraryRole, LibrarySearchResult, ListedGpu, PeerLink, PeerLinkKind, survey_gpus,
};
use protocol::DeviceKind;

use super::host::{numa_node, pcie_link};
use super::report::{
    DeviceFileReport, GpuReport, GpuVendorReport, LibraryReport, LinkKindReport, PeerLinkReport,
};
use crate::config::{DeviceArg, DoctorArgs, ProcessEnvironment};

/// Describes the GPUs of the vendor that `--device` names; with `auto`, those of all vendors.
pub(super) fn vendors(args: &DoctorArgs, environment: &ProcessEnvironment) -> Vec<GpuVendorReport> {
    let all = [("rocm", DeviceKind::Rocm), ("cuda", DeviceKind::Cuda)];
    let is_selected = |kind: DeviceKind| match args.device {
        DeviceArg::Auto => true,
        DeviceArg::Cpu => false,
        DeviceArg::Rocm => kind == DeviceKind::Rocm,
        DeviceArg::Cuda => kind == DeviceKind::Cuda,
    };
    all.into_iter()
        .filter(|(_, kind)| is_selected(*kind))
        .filter_map(|(name, kind)| {
            let libraries = args.device_libraries.as_ref();
            let survey = survey_gpus(kind, libraries, &environment.devices)?;
            Some(vendor(name, environment.devices.visibility(kind), survey))
        })
        .collect()
}

fn vendor(name: &str, visibility: String, survey: GpuInventory) -> GpuVendorReport {
    let path = if name == "rocm" { "/dev/kfd" } else { "/dev/nvidiactl" };
    GpuVendorReport {
        device: name.to_owned(),
        device_file: device_file(Path::new(path)),
        visibility,
        libraries: survey.libraries.into_iter().map(library).collect(),
        devices: survey.devices.into_iter().map(gpu).collect(),
        errors: survey.errors,
    }
}

/// Tries to open the device file of a kernel driver for reading and writing, as the GPU runtime does.
fn device_file(path: &Path) -> DeviceFileReport {
    let exists = path.exists();
    let opened = OpenOptions::new().read(true).write(true).open(path);
    let error = opened.err().filter(|_| exists).map(|error| error.to_string());
    DeviceFileReport { path: path.to_owned(), exists, error }
}

fn library(probe: LibrarySearchResult) -> LibraryReport {
    let role = match probe.role {
        LibraryRole::Driver => "driver",
        LibraryRole::Compiler => "compiler",
        LibraryRole::Blas => "blas",
        LibraryRole::Collectives => "collectives",
    };
    match probe.found {
        Ok(found) => {
            LibraryReport { role, path: Some(found.path), version: found.version, error: None }
        }
        Err(error) => {
            LibraryReport { role, path: None, version: None, error: Some(error.to_string()) }
        }
    }
}

fn gpu(gpu: ListedGpu) -> GpuReport {
    let (root, bus) = (Path::new("/"), gpu.pci_bus_id.clone());
    GpuReport {
        index: gpu.index,
        name: gpu.name,
        arch: gpu.arch,
        multiprocessors: gpu.multiprocessors,
        card_compute_units: gpu.card.map(|card| card.compute_units),
        warp_size: gpu.warp_size,
        shared_bytes: gpu.shared_bytes,
        last_level_cache_bytes: gpu.last_level_cache_bytes,
        memory_bytes: gpu.total_bytes,
        free_bytes: gpu.free_bytes,
        has_unified_memory: gpu.has_unified_memory,
        peers: gpu.links.iter().filter(|link| link.has_access).map(|link| link.peer).collect(),
        links: gpu.links.iter().map(peer_link).collect(),
        pcie: bus.as_deref().and_then(|bus| pcie_link(root, bus)),
        numa_node: bus.as_deref().and_then(|bus| numa_node(root, bus)),
        pci_bus_id: bus,
    }
}

fn peer_link(link: &PeerLink) -> PeerLinkReport {
    let &PeerLink { peer, has_access, hops, performance_rank, kind } = link;
    let kind = match kind {
        PeerLinkKind::Xgmi => LinkKindReport::Xgmi,
        PeerLinkKind::NvLink => LinkKindReport::NvLink,
        PeerLinkKind::Pcie => LinkKindReport::Pcie,
        PeerLinkKind::Unknown => LinkKindReport::Unknown,
    };
    PeerLinkReport { peer, has_access, kind, hops, performance_rank }
}
