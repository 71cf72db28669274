//! Properties of a GPU, as reported by its driver.

use std::ffi::c_int;

use hip_runtime_sys::{DeviceAttribute, DriverApi, GpuApi};

use super::card::{GpuProductSpec, last_level_cache_bytes};
use super::error::GpuError;
use super::gpu_runtime::check;

/// Properties of a GPU that affect kernels and their launches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GpuProperties {
    /// Product name of the GPU.
    pub name: String,
    /// GPU architecture, for example `gfx942` or `sm_90a`; `emulated` for the emulator.
    pub arch: String,
    /// Number of lanes of a warp (NVIDIA) or wavefront (AMD).
    pub warp_size: u32,
    /// Number of streaming multiprocessors (NVIDIA) or compute units (AMD).
    pub multiprocessors: u32,
    /// Maximum shared memory per thread block, in bytes.
    pub shared_bytes: u32,
    /// Size of the last-level cache in bytes; 0 if it is unknown.
    pub last_level_cache_bytes: u64,
    /// Whether the GPU and the host CPU share the same memory.
    pub has_unified_memory: bool,
}

/// Maximum shared memory per thread block of the emulator with 32 lanes per warp, in bytes: 227 KiB, as on
/// Hopper.
const NVIDIA_SHARED_BYTES: u32 = 227 << 10;

impl GpuProperties {
    /// Reads the properties of a device. `emulated` is the number of lanes per warp if the device is
    /// emulated.
    pub(super) fn read(
        driver: &DriverApi,
        device: c_int,
        emulated: Option<u32>,
    ) -> Result<Self, GpuError> {
        let attribute = |a: DeviceAttribute| {
            let mut value = 0;
            // SAFETY: the output pointer is valid for writes, and the attribute number belongs to this API.
            let code =
                unsafe { (driver.device_attribute)(&raw mut value, a.number(driver.api), device) };
            check(driver, code, "device attribute").map(|()| value.max(0) as u32)
        };
        let mut text = [0u8; 128];
        // SAFETY: the buffer has at least as many bytes as the call may write.
        let code = unsafe { (driver.device_name)(text.as_mut_ptr().cast(), 127, device) };
        check(driver, code, "device name")?;
        let arch = match driver.api {
            GpuApi::Hip => hip_arch(driver, device)?,
            GpuApi::Cuda => cuda_arch(
                attribute(DeviceAttribute::CapabilityMajor)?,
                attribute(DeviceAttribute::CapabilityMinor)?,
            ),
        };
        let name = until_nul(&text);
        let is_unified_card =
            GpuProductSpec::of_name(&name).is_some_and(|card| card.has_unified_memory);
        let is_integrated = attribute(DeviceAttribute::Integrated).unwrap_or(0) != 0;
        let l2_bytes = attribute(DeviceAttribute::L2Bytes).unwrap_or(0);
        Ok(Self {
            name,
            last_level_cache_bytes: last_level_cache_bytes(&arch, l2_bytes),
            has_unified_memory: is_integrated || is_unified_card,
            arch,
            warp_size: emulated.map_or_else(|| attribute(DeviceAttribute::WarpSize), Ok)?,
            multiprocessors: attribute(DeviceAttribute::Multiprocessors)?.max(1),
            shared_bytes: match emulated {
                Some(32) => NVIDIA_SHARED_BYTES,
                _ => attribute(DeviceAttribute::SharedBytesPerBlock)?,
            },
        })
    }
}

/// Returns the AMD architecture without feature flags, for example `gfx942` from `gfx942:sramecc+:xnack-`.
fn hip_arch(driver: &DriverApi, device: c_int) -> Result<String, GpuError> {
    const NAME_AT: usize = 1160;
    let Some(properties) = driver.properties else {
        let library = driver.library.display().to_string();
        let symbol = "hipGetDevicePropertiesR0600".to_owned();
        return Err(hip_runtime_sys::LibraryOpenError::NoSymbol { library, symbol }.into());
    };
    let mut bytes = [0u8; 4096]; // Larger than the struct in any version of ROCm.
    // SAFETY: the buffer is large enough for the properties struct.
    check(driver, unsafe { properties(bytes.as_mut_ptr(), device) }, "device properties")?;
    let name = until_nul(&bytes[NAME_AT..NAME_AT + 256]);
    Ok(name.split(':').next().unwrap_or_default().to_owned())
}

/// Returns the NVIDIA architecture name. Names from compute capability 9.0 on have the suffix `a`, which
/// enables architecture-specific instructions.
fn cuda_arch(major: u32, minor: u32) -> String {
    let suffix = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{suffix}")
}

/// Returns the text before the first NUL byte.
pub(super) fn until_nul(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}
