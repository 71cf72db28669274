//! Findings: problems that prevent serving on this machine, problems that make serving slow, and what is not known.

mod architecture;
mod links;

use super::report::{
    DoctorFinding, DoctorReport, FindingSeverity, GpuReport, GpuVendorReport, HostReport,
};

/// Minimum size of `/dev/shm` for RCCL or NCCL between several GPUs, in bytes.
const SHARED_MEMORY_MIN: u64 = 1 << 30;
/// Minimum hard limit of open files: one per connection, and those of the server itself.
const OPEN_FILES_MIN: u64 = 4096;
/// Last sentence of a finding about a GPU that cannot be used and that `hadron serve` replaces by the CPU.
const FALLS_BACK: &str = " `hadron serve` falls back to the CPU.";
/// Minimum limit of locked memory for direct transfers between hosts, in bytes.
const MEMLOCK_MIN: u64 = 64 << 20;

/// Whether `hadron serve` without `--device` uses the CPU although a GPU driver exists.
pub(super) fn falls_back(report: &DoctorReport) -> bool {
    report.findings.iter().any(|finding| finding.what.ends_with(FALLS_BACK))
}

/// Whether any finding prevents serving.
pub(super) fn has_error(findings: &[DoctorFinding]) -> bool {
    findings.iter().any(|finding| finding.level == FindingSeverity::Error)
}

/// Returns all findings. `is_required`: `--device` names a GPU vendor, so `hadron serve` would not fall back
/// to the CPU.
pub(super) fn findings(report: &DoctorReport, is_required: bool) -> Vec<DoctorFinding> {
    let mut list = FindingList::default();
    if report.build == "development" {
        let what = "This is a development build: HTTP, text and scheduler are hardly optimised.";
        list.warn(what, "build with --release");
    }
    for vendor in &report.gpus {
        let is_selected = vendor.device == report.device;
        if is_selected {
            usable_gpu(&mut list, vendor, is_required);
        }
        if is_selected || !vendor.devices.is_empty() {
            slow_gpus(&mut list, vendor);
        }
    }
    let has_several = report.gpus.iter().any(|vendor| vendor.devices.len() > 1);
    let has_amd = report.gpus.iter().any(|v| v.device == "rocm" && !v.devices.is_empty());
    limits(&mut list, &report.host, has_several, has_amd);
    if report.kernel_cache.as_ref().is_none_or(|cache| !cache.is_writable) {
        let remedy = "set XDG_CACHE_HOME to a folder that can be written to";
        list.warn(
            "The kernel cache cannot be written: kernels are compiled at every start.",
            remedy,
        );
    }
    list.findings
}

/// Findings in the order in which they were added.
#[derive(Debug, Default)]
struct FindingList {
    findings: Vec<DoctorFinding>,
}

impl FindingList {
    fn add(&mut self, level: FindingSeverity, what: impl Into<String>, remedy: impl Into<String>) {
        self.findings.push(DoctorFinding { level, what: what.into(), remedy: remedy.into() });
    }

    fn warn(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.add(FindingSeverity::Warning, what, remedy);
    }

    fn note(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.add(FindingSeverity::Note, what, remedy);
    }
}

/// Adds the problems that prevent serving on the GPUs of a vendor. If `is_required` is false, `hadron serve`
/// falls back to the CPU, and the problems are warnings.
fn usable_gpu(list: &mut FindingList, vendor: &GpuVendorReport, is_required: bool) {
    let level = if is_required { FindingSeverity::Error } else { FindingSeverity::Warning };
    let effect = if is_required { "" } else { FALLS_BACK };
    if let Some(error) = &vendor.device_file.error {
        let file = vendor.device_file.path.display();
        let remedy =
            "add the user to the groups `render` and `video`, or pass the device to the container";
        list.add(level, format!("{file} cannot be opened: {error}.{effect}"), remedy);
    }
    for role in ["driver", "compiler"] {
        if let Some(error) = library_error(vendor, role) {
            list.add(level, format!("{error}.{effect}"), missing_library_remedy(vendor));
        }
    }
    let is_first_usable = vendor.devices.iter().any(|gpu| gpu.index == 0);
    if is_required && !vendor.devices.is_empty() && !is_first_usable {
        let what =
            format!("GPU 0, which `hadron serve` uses, is unusable: {}.", vendor.errors.join("; "));
        list.add(level, what, "check the device, or hide it from the runtime");
    }
    let has_driver = vendor.libraries.iter().any(|l| l.role == "driver" && l.error.is_none());
    if has_driver && vendor.devices.is_empty() {
        let reasons = vendor.errors.join("; ");
        list.add(
            level,
            format!("{reasons}.{effect}"),
            "check the kernel driver, and the variables that hide devices",
        );
    }
}

/// Returns the reason why the library with this role was not opened.
fn library_error<'a>(vendor: &'a GpuVendorReport, role: &str) -> Option<&'a str> {
    let library = vendor.libraries.iter().find(|library| library.role == role);
    library.and_then(|library| library.error.as_deref())
}

fn missing_library_remedy(vendor: &GpuVendorReport) -> &'static str {
    if vendor.device == "rocm" {
        "install ROCm, or set ROCM_PATH"
    } else {
        "install the driver and NVRTC, or extend LD_LIBRARY_PATH"
    }
}

/// Adds the problems that make the GPUs of a vendor slow.
fn slow_gpus(list: &mut FindingList, vendor: &GpuVendorReport) {
    if let Some(error) = library_error(vendor, "blas") {
        let what = format!(
            "{error}. Matrix products of more than 16 rows use the built-in kernels, which are slower."
        );
        list.warn(what, missing_library_remedy(vendor));
    }
    let is_group = vendor.devices.len() > 1;
    if let Some(error) = library_error(vendor, "collectives").filter(|_| is_group) {
        let what = format!("{error}. Tensor parallelism and data parallelism on GPUs need it.");
        list.warn(what, missing_library_remedy(vendor));
    }
    if !vendor.devices.is_empty() {
        vendor.errors.iter().for_each(|error| list.warn(format!("{error}."), "check the device"));
    }
    let visibility = &vendor.visibility;
    let has_both = visibility.contains("ROCR_") && visibility.contains("HIP_VISIBLE");
    if vendor.device == "rocm" && has_both {
        let what = format!(
            "{}: HIP counts among the devices that ROCR_VISIBLE_DEVICES leaves.",
            vendor.visibility
        );
        list.warn(what, "set only one of the variables");
    }
    for gpu in &vendor.devices {
        links::links(list, vendor, gpu);
        partition(list, gpu);
    }
    architecture::architectures(list, vendor);
}

/// Adds a finding if a GPU is a partition of its card.
fn partition(list: &mut FindingList, gpu: &GpuReport) {
    if let Some(units) = gpu.card_compute_units.filter(|&units| gpu.multiprocessors < units) {
        let what = format!(
            "GPU {} has {} of the {units} compute units of its card: it is a partition.",
            gpu.index, gpu.multiprocessors
        );
        list.warn(what, "select the compute partition SPX with amd-smi, unless this is intended");
    }
}

/// Adds findings about limits of the host. `has_several`: there are several GPUs of one vendor.
fn limits(list: &mut FindingList, host: &HostReport, has_several: bool, has_amd: bool) {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    if let Some(shm) = host.shared_memory.filter(|shm| shm.total_bytes < SHARED_MEMORY_MIN)
        && has_several
    {
        let what = format!(
            "/dev/shm has {:.2} GiB: RCCL and NCCL need about 1 GiB between GPUs.",
            gib(shm.total_bytes)
        );
        list.warn(what, "start the container with --shm-size 16g or --ipc host");
    }
    if let Some(files) = host.open_files.filter(|&files| files < OPEN_FILES_MIN) {
        let what =
            format!("At most {files} files may be open: the server accepts fewer connections.");
        list.warn(what, "raise `ulimit -n`");
    }
    if let Some(bytes) = host.memlock_bytes.filter(|&bytes| bytes < MEMLOCK_MIN)
        && has_several
    {
        let what = format!(
            "`ulimit -l` is {} KiB: RDMA between hosts cannot register memory.",
            bytes >> 10
        );
        list.warn(what, "set it to unlimited");
    }
    if host.numa_balancing == Some(true) && has_amd {
        let what = "NUMA balancing is on: page migration interrupts GPU work.";
        list.warn(what, "echo 0 > /proc/sys/kernel/numa_balancing");
    }
}

#[cfg(test)]
mod tests;
