//! Facts about the host, from `/proc`, `/sys` and system calls. The root folder of these files is a
//! parameter, so that tests can provide the files of other hosts.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};

use super::report::{HostReport, KernelCacheReport, PcieLink, VolumeReport};

/// Describes the host whose files are below `root`.
pub(super) fn host(root: &Path) -> HostReport {
    let memory = text(root, "proc/meminfo");
    let bytes = |name: &str| {
        let line = memory.as_deref()?.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    let cpu = text(root, "proc/cpuinfo").and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?.to_owned();
        Some(line.split_once(':')?.1.trim().to_owned())
    });
    HostReport {
        kernel: text(root, "proc/sys/kernel/osrelease"),
        cpu,
        cores: executor::physical_cores(),
        numa_nodes: numa_nodes(root),
        numa_balancing: text(root, "proc/sys/kernel/numa_balancing").map(|text| text != "0"),
        memory_bytes: bytes("MemTotal:"),
        available_bytes: bytes("MemAvailable:"),
        shared_memory: volume(&root.join("dev/shm")),
        memlock_bytes: getrlimit(Resource::Memlock).current,
        open_files: getrlimit(Resource::Nofile).maximum,
    }
}

/// Describes the PCIe link of the device with the address `bus_id`.
pub(super) fn pcie_link(root: &Path, bus_id: &str) -> Option<PcieLink> {
    let read = |name: &str| text(root, &format!("sys/bus/pci/devices/{bus_id}/{name}"));
    let speed = |name: &str| read(name).as_deref().and_then(transfer_rate);
    Some(PcieLink {
        width: read("current_link_width")?.parse().ok()?,
        max_width: read("max_link_width")?.parse().ok()?,
        speed_mt_s: speed("current_link_speed"),
        max_speed_mt_s: speed("max_link_speed"),
    })
}

/// Returns a PCIe speed such as `32.0 GT/s PCIe` in million transfers per second; `None` for `Unknown`.
fn transfer_rate(text: &str) -> Option<u32> {
    let (number, _) = text.split_once(" GT/s")?;
    let rate: f64 = number.parse().ok()?;
    (0.0..1e6).contains(&rate).then(|| (rate * 1e3).round() as u32)
}

/// Returns the NUMA node of the device with the address `bus_id`; `None` on hosts with one node.
pub(super) fn numa_node(root: &Path, bus_id: &str) -> Option<i32> {
    let node = text(root, &format!("sys/bus/pci/devices/{bus_id}/numa_node"))?;
    node.parse().ok().filter(|&node| node >= 0)
}

/// Describes a cache of compiled kernels. Whether the folder is writable is tested by creating a file and
/// removing it; the folder itself is not created.
pub(super) fn kernel_cache(folder: &Path) -> KernelCacheReport {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let images: Vec<u64> = entries
        .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "co"))
        .filter_map(|entry| Some(entry.metadata().ok()?.len()))
        .collect();
    // If the cache folder does not exist, the nearest existing ancestor is tested, in which the cache folder
    // would be created.
    let existing = folder.ancestors().find(|folder| folder.exists()).unwrap_or(folder);
    KernelCacheReport {
        folder: folder.to_owned(),
        images: images.len(),
        bytes: images.iter().sum(),
        is_writable: is_writable(existing),
    }
}

fn is_writable(folder: &Path) -> bool {
    let file = folder.join(format!(".hadron-doctor-{}", std::process::id()));
    let created = fs::File::create_new(&file).is_ok();
    created && fs::remove_file(&file).is_ok()
}

fn numa_nodes(root: &Path) -> Option<usize> {
    let entries = fs::read_dir(root.join("sys/devices/system/node")).ok()?.flatten();
    let is_node =
        |name: &str| name.strip_prefix("node").is_some_and(|rest| rest.parse::<u32>().is_ok());
    Some(entries.filter(|entry| entry.file_name().to_str().is_some_and(is_node)).count())
}

fn volume(folder: &Path) -> Option<VolumeReport> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    Some(VolumeReport {
        total_bytes: stat.f_blocks * stat.f_frsize,
        free_bytes: stat.f_bavail * stat.f_frsize,
    })
}

fn text(root: &Path, path: &str) -> Option<String> {
    fs::read_to_string(root.join(path)).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_facts_are_read_from_files() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/meminfo", "MemTotal:       2048 kB\nMemAvailable:   1024 kB\n");
        write("proc/cpuinfo", "processor\t: 0\nmodel name\t: AMD EPYC 9654\n");
        write("proc/sys/kernel/numa_balancing", "1\n");
        write("sys/devices/system/node/node0/cpulist", "0-3\n");
        write("sys/devices/system/node/node1/cpulist", "4-7\n");
        write("sys/devices/system/node/possible", "0-1\n");
        write("sys/bus/pci/devices/0000:c1:00.0/current_link_width", "8\n");
        write("sys/bus/pci/devices/0000:c1:00.0/max_link_width", "16\n");
        write("sys/bus/pci/devices/0000:c1:00.0/current_link_speed", "2.5 GT/s PCIe\n");
        write("sys/bus/pci/devices/0000:c1:00.0/max_link_speed", "Unknown\n");
        write("sys/bus/pci/devices/0000:c1:00.0/numa_node", "1\n");
        write("sys/bus/pci/devices/0000:c2:00.0/numa_node", "-1\n");
        let host = host(root.path());
        assert_eq!((host.memory_bytes, host.available_bytes), (Some(2 << 20), Some(1 << 20)));
        assert_eq!(host.cpu.as_deref(), Some("AMD EPYC 9654"));
        assert_eq!((host.numa_nodes, host.numa_balancing), (Some(2), Some(true)));
        assert!(host.cores > 0 && host.kernel.is_none() && host.shared_memory.is_none());
        let link =
            PcieLink { width: 8, max_width: 16, speed_mt_s: Some(2500), max_speed_mt_s: None };
        assert_eq!(pcie_link(root.path(), "0000:c1:00.0"), Some(link));
        assert_eq!(pcie_link(root.path(), "0000:c2:00.0"), None);
        let nodes = ["0000:c1:00.0", "0000:c2:00.0"].map(|bus| numa_node(root.path(), bus));
        assert_eq!(nodes, [Some(1), None]);
    }

    #[test]
    fn pcie_speeds_are_parsed() {
        let rates = ["2.5 GT/s PCIe", "32.0 GT/s PCIe", "8 GT/s", "Unknown", "x GT/s", "-1 GT/s"];
        let expected = [Some(2500), Some(32_000), Some(8000), None, None, None];
        assert_eq!(rates.map(transfer_rate), expected);
    }

    #[test]
    fn kernel_cache_is_measured_and_not_created() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("cache/hadron");
        let missing = kernel_cache(&folder);
        assert!(missing.is_writable && missing.images == 0 && !folder.exists());
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("a.co"), [0; 100]).unwrap();
        fs::write(folder.join("b.co"), [0; 20]).unwrap();
        fs::write(folder.join("notes.txt"), "no image").unwrap();
        let found = kernel_cache(&folder);
        assert_eq!((found.images, found.bytes, found.is_writable), (2, 120, true));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 3, "no file remains");
        assert!(!kernel_cache(&folder.join("a.co/below-a-file")).is_writable);
    }
}
