//! What `--device auto` means on this machine.

use crate::config::DeviceArg;
use std::path::Path;

/// What the drivers' kernel modules make, in the order in which they are tried.
const DEVICE_FILES: &[(&str, DeviceArg)] =
    &[("/dev/kfd", DeviceArg::Rocm), ("/dev/nvidiactl", DeviceArg::Cuda)];

/// The backend worth trying: whether a GPU can be used is known once an executor has opened it.
pub fn detect() -> DeviceArg {
    let there = DEVICE_FILES.iter().find(|(node, _)| Path::new(node).exists());
    there.map_or(DeviceArg::Cpu, |(_, kind)| *kind)
}
