//! Formats the report as one page of text.

use std::fmt::Write as _;

use super::report::{
    DoctorReport, FindingSeverity, GpuReport, GpuVendorReport, HostReport, KernelCacheReport,
    LibraryReport, LinkKindReport, PcieLink, PeerLinkReport,
};

/// Returns the page.
pub(super) fn page(report: &DoctorReport) -> String {
    let mut out = String::new();
    line(&mut out, &format!("hadron {}, {} build", report.version, report.build));
    host(&mut out, &report.host);
    kernel_cache(&mut out, report.kernel_cache.as_ref());
    report.gpus.iter().for_each(|vendor| gpus(&mut out, vendor));
    line(&mut out, "");
    for finding in &report.findings {
        let level = match finding.level {
            FindingSeverity::Error => "ERROR",
            FindingSeverity::Warning => "WARNING",
            FindingSeverity::Note => "NOTE",
        };
        line(&mut out, &format!("{level}  {} ({})", finding.what, finding.remedy));
    }
    let verdict = if report.can_serve { "can" } else { "cannot" };
    line(&mut out, &format!("This machine {verdict} serve with --device {}.", report.device));
    line(&mut out, "In a report of a problem, include the output of `hadron doctor --json`.");
    out
}

fn line(out: &mut String, text: &str) {
    let _infallible = writeln!(out, "{}", text.trim_end());
}

fn host(out: &mut String, host: &HostReport) {
    let unknown = || "unknown".to_owned();
    let text = |value: Option<&String>| value.cloned().unwrap_or_else(unknown);
    let bytes = |value: Option<u64>| value.map_or_else(unknown, size);
    line(out, &format!("kernel         Linux {}", text(host.kernel.as_ref())));
    let nodes = host.numa_nodes.map_or_else(unknown, |nodes| nodes.to_string());
    let cpu = text(host.cpu.as_ref());
    line(out, &format!("processor      {cpu}, {} cores, NUMA nodes: {nodes}", host.cores));
    let (free, total) = (bytes(host.available_bytes), bytes(host.memory_bytes));
    line(out, &format!("memory         {free} of {total} available"));
    let shm = host.shared_memory;
    let shm = shm.map_or_else(unknown, |shm| {
        format!("{} of {} free", size(shm.free_bytes), size(shm.total_bytes))
    });
    let limit =
        |value: Option<u64>| value.map_or("unlimited".to_owned(), |value| value.to_string());
    let memlock = host.memlock_bytes.map_or("unlimited".to_owned(), size);
    line(
        out,
        &format!(
            "limits         /dev/shm {shm}, locked memory {memlock}, open files {}",
            limit(host.open_files)
        ),
    );
}

fn kernel_cache(out: &mut String, cache: Option<&KernelCacheReport>) {
    match cache {
        None => line(out, "kernel cache   none: neither XDG_CACHE_HOME nor HOME is set"),
        Some(cache) => line(
            out,
            &format!(
                "kernel cache   {}: {} images, {}, {}",
                cache.folder.display(),
                cache.images,
                size(cache.bytes),
                if cache.is_writable { "writable" } else { "not writable" }
            ),
        ),
    }
}

fn gpus(out: &mut String, vendor: &GpuVendorReport) {
    line(out, "");
    let title = if vendor.device == "rocm" { "AMD GPUs (rocm)" } else { "NVIDIA GPUs (cuda)" };
    let visibility = match vendor.visibility.as_str() {
        "" => String::new(),
        variables => format!(", {variables}"),
    };
    let file = &vendor.device_file;
    let state = match (&file.error, file.exists) {
        (Some(error), _) => error.as_str(),
        (None, true) => "accessible",
        (None, false) => "absent",
    };
    line(
        out,
        &format!("{title}: {}, {} {state}{visibility}", vendor.devices.len(), file.path.display()),
    );
    vendor.libraries.iter().for_each(|found| library(out, found));
    vendor.devices.iter().for_each(|device| gpu(out, device));
    vendor.errors.iter().for_each(|error| line(out, &format!("  {error}")));
}

fn library(out: &mut String, library: &LibraryReport) {
    let text = match (&library.path, &library.version, &library.error) {
        (Some(path), Some(version), _) => format!("{}, version {version}", path.display()),
        (Some(path), None, _) => path.display().to_string(),
        (None, _, error) => error.clone().unwrap_or_default(),
    };
    line(out, &format!("  {:<13}{text}", library.role));
}

fn gpu(out: &mut String, gpu: &GpuReport) {
    let unified = if gpu.has_unified_memory { ", shared with the host" } else { "" };
    line(
        out,
        &format!(
            "  GPU {:<9}{}, {}, {} compute units of {} lanes, {} shared memory, {} last-level cache",
            gpu.index,
            if gpu.name.is_empty() { "(no name)" } else { &gpu.name },
            gpu.arch,
            gpu.multiprocessors,
            gpu.warp_size,
            size(u64::from(gpu.shared_bytes)),
            size(gpu.last_level_cache_bytes),
        ),
    );
    let mut facts =
        vec![format!("{} of {} free{unified}", size(gpu.free_bytes), size(gpu.memory_bytes))];
    facts.extend(gpu.pci_bus_id.as_ref().map(|bus| format!("PCI {bus}")));
    facts.extend(gpu.pcie.as_ref().map(pcie));
    facts.extend(gpu.numa_node.map(|node| format!("NUMA node {node}")));
    facts.push(peer_access(&gpu.links));
    line(out, &format!("  {:<13}{}", "", facts.join(", ")));
}

/// Describes the PCIe link of a GPU. The speed is omitted if it is not known.
fn pcie(link: &PcieLink) -> String {
    let lanes = format!("{} of {} lanes", link.width, link.max_width);
    let gt_s = |speed: u32| f64::from(speed) / 1e3;
    match (link.speed_mt_s, link.max_speed_mt_s) {
        (Some(speed), Some(max)) => format!("{lanes} at {} of {} GT/s", gt_s(speed), gt_s(max)),
        (Some(speed), None) => format!("{lanes} at {} GT/s", gt_s(speed)),
        (None, _) => lanes,
    }
}

/// Lists the GPUs whose memory a GPU can access, grouped by link.
fn peer_access(links: &[PeerLinkReport]) -> String {
    let mut groups: Vec<(String, Vec<String>)> = Vec::new();
    for link in links.iter().filter(|link| link.has_access) {
        let (about, peer) = (link_text(link), link.peer.to_string());
        match groups.iter_mut().find(|group| group.0 == about) {
            Some(group) => group.1.push(peer),
            None => groups.push((about, vec![peer])),
        }
    }
    let texts = groups.iter().map(|(about, peers)| format!("to {} ({about})", peers.join(" ")));
    let texts: Vec<String> = texts.collect();
    if texts.is_empty() {
        "no peer access".to_owned()
    } else {
        format!("peer access {}", texts.join(", "))
    }
}

/// Describes a link to another GPU.
fn link_text(link: &PeerLinkReport) -> String {
    let kind = match link.kind {
        LinkKindReport::Xgmi => "xGMI",
        LinkKindReport::NvLink => "NVLink",
        LinkKindReport::Pcie => "PCIe",
        LinkKindReport::Unknown => "unknown link",
    };
    match link.hops {
        Some(1) => format!("{kind}, 1 hop"),
        Some(hops) => format!("{kind}, {hops} hops"),
        None => kind.to_owned(),
    }
}

/// Returns a number of bytes with a binary unit.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (bytes.max(1).ilog2() / 10).min(4) as usize;
    let value = bytes as f64 / 1024_f64.powi(unit as i32);
    if value.fract() == 0.0 {
        format!("{value} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_grouped_by_link() {
        let link = |peer, kind, hops: Option<u32>| PeerLinkReport {
            peer,
            has_access: kind != LinkKindReport::Unknown || hops.is_none(),
            kind,
            hops,
            performance_rank: None,
        };
        let (xgmi, pcie) = (LinkKindReport::Xgmi, LinkKindReport::Pcie);
        let links = [
            link(1, xgmi, Some(1)),
            link(2, pcie, Some(2)),
            link(3, xgmi, Some(1)),
            link(4, LinkKindReport::Unknown, Some(7)),
            link(5, LinkKindReport::Unknown, None),
        ];
        let text = "peer access to 1 3 (xGMI, 1 hop), to 2 (PCIe, 2 hops), to 5 (unknown link)";
        assert_eq!(peer_access(&links), text);
        assert_eq!(peer_access(&links[3..4]), "no peer access");
    }

    #[test]
    fn pcie_speed_is_shown_if_known() {
        let link = |speed_mt_s, max_speed_mt_s| {
            pcie(&PcieLink { width: 8, max_width: 16, speed_mt_s, max_speed_mt_s })
        };
        assert_eq!(link(Some(2500), Some(32_000)), "8 of 16 lanes at 2.5 of 32 GT/s");
        assert_eq!(link(Some(32_000), None), "8 of 16 lanes at 32 GT/s");
        assert_eq!(link(None, Some(32_000)), "8 of 16 lanes");
    }

    #[test]
    fn sizes_have_binary_units() {
        for (bytes, expected) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (64 << 10, "64 KiB"),
            (256 << 20, "256 MiB"),
            (3 << 29, "1.5 GiB"),
            (192 << 30, "192 GiB"),
            (1 << 60, "1048576 TiB"),
        ] {
            assert_eq!(size(bytes), expected);
        }
    }
}
