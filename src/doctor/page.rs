//! Formats the report as one page of text.

use std::fmt::Write as _;

use super::report::{
    DoctorReport, FindingSeverity, GpuReport, GpuVendorReport, HostReport, KernelCacheReport,
    LibraryReport,
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
    facts.extend(gpu.pcie.map(|link| format!("{} of {} lanes", link.width, link.max_width)));
    facts.extend(gpu.numa_node.map(|node| format!("NUMA node {node}")));
    let peers: Vec<String> = gpu.peers.iter().map(ToString::to_string).collect();
    facts.push(match peers.as_slice() {
        [] => "no peer access".to_owned(),
        peers => format!("peer access to {}", peers.join(" ")),
    });
    line(out, &format!("  {:<13}{}", "", facts.join(", ")));
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
    use super::size;

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
