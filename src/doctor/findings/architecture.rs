//! Findings about the architecture of a GPU: whether kernels are compiled and tested for it, whether ROCm is new
//! enough, and what was never measured.

use super::FindingList;
use crate::doctor::report::{GpuReport, GpuVendorReport};

/// Major and minor version of a library.
type LibraryVersion = [u32; 2];

/// First ROCm release that supports gfx950, by ROCm's compatibility matrix
/// (<https://rocm.docs.amd.com/en/docs-7.0.0/compatibility/compatibility-matrix.html>). The HIP runtime has the
/// major and minor version of its ROCm release.
const GFX950_ROCM_MIN: LibraryVersion = [7, 0];

/// Evidence that kernels work on a GPU architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KernelSupport {
    /// Kernels are compiled, and tested on a GPU or as emulated machine code.
    Tested,
    /// Kernels are compiled by `kernels/csrc/gate.py`, but nothing has run them.
    CompiledOnly,
    /// Kernels were never compiled.
    Unsupported,
}

/// Returns the evidence for an architecture. `emulated` is the SIMT emulator of the tests.
fn kernel_support(arch: &str) -> KernelSupport {
    match arch {
        "gfx942" | "gfx950" | "sm_90a" | "emulated" => KernelSupport::Tested,
        "gfx90a" => KernelSupport::CompiledOnly,
        _ => KernelSupport::Unsupported,
    }
}

/// Adds the findings about the architectures of all GPUs of a vendor.
pub(super) fn architectures(list: &mut FindingList, vendor: &GpuVendorReport) {
    for gpu in &vendor.devices {
        untested_kernels(list, gpu);
        old_rocm(list, vendor, gpu);
    }
    if vendor.devices.iter().any(|gpu| gpu.arch.starts_with("gfx")) {
        let what = "No AMD GPU has run Hadron yet: kernels are tested on emulators, and no speed figure of this \
                    project was measured on an AMD GPU.";
        let remedy =
            "see docs/amd-status.md; deploy/first_day_amd.sh checks and measures a machine";
        list.note(what, remedy);
    }
}

fn untested_kernels(list: &mut FindingList, gpu: &GpuReport) {
    let GpuReport { index, arch, .. } = gpu;
    let reason = match kernel_support(arch) {
        KernelSupport::Tested => return,
        KernelSupport::CompiledOnly => format!(
            "kernels compile for {arch}, but no test has run them, and they were never compiled for float16."
        ),
        KernelSupport::Unsupported => format!(
            "no kernel was ever compiled for {arch}. The compilation at the start may fail, and no test has run \
             the kernels."
        ),
    };
    let what = format!("GPU {index} is unsupported: {reason}");
    list.warn(what, "see docs/quickstart.md for supported GPUs");
}

fn old_rocm(list: &mut FindingList, vendor: &GpuVendorReport, gpu: &GpuReport) {
    let driver = vendor.libraries.iter().find(|library| library.role == "driver");
    let Some(version) = driver.and_then(|driver| driver.version.as_deref()) else { return };
    if gpu.arch != "gfx950" || parsed(version).is_none_or(|found| found >= GFX950_ROCM_MIN) {
        return;
    }
    let [major, minor] = GFX950_ROCM_MIN;
    let what = format!(
        "GPU {}: ROCm {version} is too old for gfx950, which ROCm {major}.{minor} is the first to support.",
        gpu.index
    );
    list.warn(what, "install a newer ROCm, or set ROCM_PATH");
}

/// Returns the major and minor number of a version such as `7.0.51831`.
fn parsed(version: &str) -> Option<LibraryVersion> {
    let mut numbers = version.split('.').map(|number| number.parse().ok());
    Some([numbers.next()??, numbers.next()??])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_of_the_kernel_gate_have_a_support_level() {
        let gate = include_str!("../../../kernels/csrc/gate.py");
        let line = gate.lines().find_map(|line| line.strip_prefix("TARGETS = ")).unwrap();
        let targets: Vec<&str> = serde_json::from_str(line).unwrap();
        let unsupported = |arch: &&str| kernel_support(arch) == KernelSupport::Unsupported;
        assert!(targets.len() >= 4 && !targets.iter().any(unsupported), "{targets:?}");
    }

    #[test]
    fn versions_are_compared_by_number() {
        assert_eq!(parsed("7.0.51831"), Some([7, 0]));
        assert!(parsed("10.1.0") > parsed("7.2.1") && parsed("6.4.4") < Some(GFX950_ROCM_MIN));
        assert_eq!([parsed("7"), parsed("seven.0")], [None, None]);
    }

    /// The finding must change with the page.
    #[test]
    fn status_page_says_that_no_amd_gpu_has_run() {
        assert!(
            include_str!("../../../docs/amd-status.md").contains("No AMD GPU has run Hadron yet.")
        );
    }
}
