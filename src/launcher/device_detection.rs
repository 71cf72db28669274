//! Resolves `--device auto` on this machine.

use crate::config::DeviceArg;
use std::path::Path;

/// Device files of the GPU drivers, in the order in which they are checked, with their backends.
const DEVICE_FILES: &[(&str, DeviceArg)] =
    &[("/dev/kfd", DeviceArg::Rocm), ("/dev/nvidiactl", DeviceArg::Cuda)];

/// Returns the backend to try first. Whether the GPU is usable is known only after an executor has opened it.
pub fn detect() -> DeviceArg {
    let found = DEVICE_FILES.iter().find(|(path, _)| Path::new(path).exists());
    found.map_or(DeviceArg::Cpu, |(_, kind)| *kind)
}
