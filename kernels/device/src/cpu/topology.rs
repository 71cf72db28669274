//! Number of physical cores that are available to the process; this is the default number of compute threads.

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::path::Path;

/// Number of physical cores that are available to the process, at least 1. The hardware threads of one core
/// count once. CPU affinity and the CPU limit of the cgroup are taken into account.
#[must_use]
pub fn physical_cores() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    cores_of(Path::new("/sys/devices/system/cpu")).map_or(allowed, |cores| cores.min(allowed))
}

/// Counts the distinct sets of sibling hardware threads in the sysfs folder `cpus`; `None` if the folder does
/// not exist.
fn cores_of(cpus: &Path) -> Option<usize> {
    let siblings: HashSet<String> = std::fs::read_dir(cpus)
        .ok()?
        .filter_map(Result::ok)
        .filter_map(|cpu| std::fs::read_to_string(cpu.path().join("topology/core_cpus_list")).ok())
        .collect();
    (!siblings.is_empty()).then_some(siblings.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_count_is_positive() {
        assert!(physical_cores() >= 1);
    }

    #[test]
    fn missing_folder_yields_no_cores() {
        assert_eq!(cores_of(Path::new("/nonexistent")), None);
    }
}
