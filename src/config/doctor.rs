//! Flags of `hadron doctor`.

use clap::Args;
use protocol::DeviceLibraries;

use super::engine::{DEVICE_LIBRARIES_SYNTAX, DeviceArg, parse_device_libraries};

/// Arguments of `hadron doctor`.
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// Device that must be able to serve; auto reports all GPUs, and requires none
    #[arg(long, default_value = "auto")]
    pub device: DeviceArg,
    /// Paths of device libraries, as for hadron serve
    #[arg(long, hide = true, value_parser = parse_device_libraries, value_name = DEVICE_LIBRARIES_SYNTAX)]
    pub device_libraries: Option<DeviceLibraries>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
