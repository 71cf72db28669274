//! Values of `--device` and `--device-libraries`.

use clap::ValueEnum;
use protocol::DeviceLibraries;
use std::path::PathBuf;

/// Device that the executors compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    /// GPU if there is one, else the CPU
    Auto,
    /// CPU of this machine
    Cpu,
    /// AMD GPUs, through ROCm (HIP)
    #[value(alias = "hip")]
    Rocm,
    /// NVIDIA GPUs, through CUDA
    Cuda,
}

/// Syntax of the flag `--device-libraries`.
pub(crate) const DEVICE_LIBRARIES_SYNTAX: &str =
    "DRIVER[,COMPILER[,BLAS[,WARP_SIZE[,COLLECTIVES]]]]";

/// Parses the value of `--device-libraries`. All items except the driver library may be empty. If no compiler
/// library is given, the driver library contains the run-time compiler. `WARP_SIZE` is given only for
/// libraries that emulate a GPU.
pub(crate) fn parse_device_libraries(text: &str) -> Result<DeviceLibraries, String> {
    let items: Vec<&str> = text.split(',').collect();
    let item = |index: usize| items.get(index).copied().filter(|item| !item.is_empty());
    let path = |index: usize| item(index).map(PathBuf::from);
    let warp_size = item(3).map(str::parse::<u32>).transpose();
    match (path(0), warp_size, items.len()) {
        (Some(driver), Ok(emulated_warp_size), 1..=5) => {
            let (compiler, blas, collectives) = (path(1), path(2), path(4));
            Ok(DeviceLibraries { driver, compiler, blas, emulated_warp_size, collectives })
        }
        _ => Err(format!("not {DEVICE_LIBRARIES_SYNTAX}")),
    }
}
