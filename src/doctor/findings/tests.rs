//! Tests of the findings for a machine with two AMD GPUs.

use super::super::report::{
    DeviceFileReport, KernelCacheReport, LibraryReport, LinkKindReport, PcieLink, PeerLinkReport,
    VolumeReport,
};
use super::*;

/// A PCIe link with all lanes at full speed.
const PCIE: PcieLink =
    PcieLink { width: 16, max_width: 16, speed_mt_s: Some(32_000), max_speed_mt_s: Some(32_000) };

fn peer_link(peer: usize, kind: LinkKindReport) -> PeerLinkReport {
    PeerLinkReport { peer, has_access: true, kind, hops: Some(1), performance_rank: None }
}

fn gpu(index: usize) -> GpuReport {
    GpuReport {
        index,
        name: "AMD Instinct MI300X".to_owned(),
        arch: "gfx942".to_owned(),
        multiprocessors: 304,
        card_compute_units: Some(304),
        warp_size: 64,
        shared_bytes: 64 << 10,
        last_level_cache_bytes: 256 << 20,
        memory_bytes: 192 << 30,
        free_bytes: 192 << 30,
        has_unified_memory: false,
        peers: vec![1 - index],
        links: vec![peer_link(1 - index, LinkKindReport::Xgmi)],
        pci_bus_id: None,
        pcie: Some(PCIE),
        numa_node: None,
    }
}

fn host() -> HostReport {
    HostReport {
        kernel: None,
        cpu: None,
        cores: 96,
        numa_nodes: Some(2),
        numa_balancing: Some(false),
        memory_bytes: None,
        available_bytes: None,
        shared_memory: Some(VolumeReport { total_bytes: 64 << 30, free_bytes: 64 << 30 }),
        memlock_bytes: None,
        open_files: None,
    }
}

/// A machine with two AMD GPUs and no findings.
fn machine() -> DoctorReport {
    let path = "/dev/kfd".into();
    let rocm = GpuVendorReport {
        device: "rocm".to_owned(),
        device_file: DeviceFileReport { path, exists: true, error: None },
        visibility: String::new(),
        libraries: Vec::new(),
        devices: vec![gpu(0), gpu(1)],
        errors: Vec::new(),
    };
    let folder = "/cache".into();
    DoctorReport {
        version: String::new(),
        build: "release".to_owned(),
        device: "rocm".to_owned(),
        can_serve: true,
        host: host(),
        kernel_cache: Some(KernelCacheReport { folder, images: 0, bytes: 0, is_writable: true }),
        gpus: vec![rocm],
        findings: Vec::new(),
    }
}

/// Returns the texts of all warnings for `machine()` with `change` applied.
fn found(change: impl FnOnce(&mut DoctorReport)) -> Vec<String> {
    let mut report = machine();
    change(&mut report);
    let found = findings(&report, true);
    assert!(!has_error(&found), "{found:?}");
    texts(found, FindingSeverity::Warning)
}

/// Returns the texts of the findings with severity `level`.
fn texts(found: Vec<DoctorFinding>, level: FindingSeverity) -> Vec<String> {
    found.into_iter().filter(|finding| finding.level == level).map(|finding| finding.what).collect()
}

#[test]
fn slow_parts_of_a_machine_are_named() {
    assert_eq!(found(|_| ()), Vec::<String>::new());
    let gpu = |change: fn(&mut GpuReport)| found(|m| change(&mut m.gpus[0].devices[1]));
    let host = |change: fn(&mut HostReport)| found(|m| change(&mut m.host));
    let findings = [
        (gpu(|gpu| gpu.peers.clear()), "GPU 1 has no peer access to GPU 0"),
        (gpu(|gpu| gpu.pcie = Some(PcieLink { width: 4, ..PCIE })), "uses 4 of 16 PCIe"),
        (
            gpu(|gpu| gpu.pcie = Some(PcieLink { speed_mt_s: Some(2500), ..PCIE })),
            "GPU 1 uses 2.5 of 32 GT/s of PCIe",
        ),
        (
            gpu(|gpu| gpu.links.push(peer_link(2, LinkKindReport::Pcie))),
            "GPU 1 is connected to GPU 2 by PCIe only, and to GPU 0 by a faster link",
        ),
        (gpu(|gpu| gpu.multiprocessors = 38), "38 of the 304 compute units"),
        (
            gpu(|gpu| gpu.arch = "gfx906".to_owned()),
            "GPU 1 is unsupported: no kernel was ever compiled for gfx906",
        ),
        (
            gpu(|gpu| gpu.arch = "gfx90a".to_owned()),
            "GPU 1 is unsupported: kernels compile for gfx90a, but no test has run them",
        ),
        (host(|host| host.numa_balancing = Some(true)), "NUMA balancing is on"),
        (host(|host| host.open_files = Some(1024)), "At most 1024 files"),
        (host(|host| host.memlock_bytes = Some(8 << 20)), "`ulimit -l` is 8192 KiB"),
        (host(|host| host.shared_memory.as_mut().unwrap().total_bytes = 64 << 20), "0.06 GiB"),
        (found(|m| m.build = "development".to_owned()), "development build"),
        (found(|m| m.kernel_cache = None), "kernel cache cannot be written"),
    ];
    for (found, expected) in findings {
        assert!(found.len() == 1 && found[0].contains(expected), "{expected}: {found:?}");
    }
}

#[test]
fn unknown_pcie_speed_is_no_finding() {
    for (speed_mt_s, max_speed_mt_s) in [(None, Some(32_000)), (Some(2500), None)] {
        let link = PcieLink { speed_mt_s, max_speed_mt_s, ..PCIE };
        assert_eq!(found(|m| m.gpus[0].devices[0].pcie = Some(link)), Vec::<String>::new());
    }
}

#[test]
fn gfx950_needs_rocm_7() {
    let with_rocm = |version: &str, arch: &str| {
        found(|m| {
            m.gpus[0].devices[1].arch = arch.to_owned();
            m.gpus[0].libraries.push(LibraryReport {
                role: "driver",
                path: Some("libamdhip64.so.6".into()),
                version: Some(version.to_owned()),
                error: None,
            });
        })
    };
    let old = with_rocm("6.4.43484", "gfx950");
    let expected = "GPU 1: ROCm 6.4.43484 is too old for gfx950, which ROCm 7.0 is the first";
    assert!(old.len() == 1 && old[0].contains(expected), "{old:?}");
    for (version, arch) in [("7.0.51831", "gfx950"), ("10.1.0", "gfx950"), ("6.4.43484", "gfx942")]
    {
        assert_eq!(with_rocm(version, arch), Vec::<String>::new(), "{version}, {arch}");
    }
}

#[test]
fn speed_on_amd_gpus_is_noted_as_unmeasured() {
    let notes = |report: &DoctorReport| texts(findings(report, true), FindingSeverity::Note);
    let mut report = machine();
    let found = notes(&report);
    assert!(found.len() == 1 && found[0].contains("no speed figure"), "{found:?}");
    report.gpus[0].devices.iter_mut().for_each(|gpu| gpu.arch = "sm_90a".to_owned());
    assert_eq!(notes(&report), Vec::<String>::new());
}

#[test]
fn an_unusable_gpu_is_an_error_only_if_required() {
    let mut report = machine();
    report.gpus[0].devices.clear();
    report.gpus[0].device_file.error = Some("Permission denied".to_owned());
    assert!(has_error(&findings(&report, true)));
    let optional = findings(&report, false);
    assert!(!has_error(&optional) && optional[0].what.contains("falls back to the CPU"));
}
