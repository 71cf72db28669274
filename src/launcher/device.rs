//! What `--device auto` means on this machine.

use crate::config::DeviceKind;
use std::path::Path;

/// What the drivers' kernel modules make, in the order in which they are tried.
const NODES: &[(&str, DeviceKind)] =
    &[("/dev/kfd", DeviceKind::Rocm), ("/dev/nvidiactl", DeviceKind::Cuda)];

/// The backend worth trying: whether a GPU can be used is known once an executor has opened it.
pub fn found() -> DeviceKind {
    let there = NODES.iter().find(|(node, _)| Path::new(node).exists());
    there.map_or(DeviceKind::Cpu, |(_, kind)| *kind)
}
