//! Links between the GPUs of a host: the kind of each link, its number of hops, and whether a GPU can access the
//! memory of another GPU over the link. The driver functions that describe links are optional.

use std::ffi::c_int;

use hip_runtime_sys::{DriverApi, code, link};

/// Kind of a link between two GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerLinkKind {
    /// xGMI (Infinity Fabric) between AMD GPUs.
    Xgmi,
    /// NVLink between NVIDIA GPUs.
    NvLink,
    /// PCIe.
    Pcie,
    /// The driver does not report the kind, or reports a kind that is not listed here.
    Unknown,
}

/// Link from one GPU to another GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerLink {
    /// Index of the other GPU.
    pub peer: usize,
    /// Whether the GPU can access the memory of the other GPU.
    pub has_access: bool,
    /// Kind of the link.
    pub kind: PeerLinkKind,
    /// Number of hops; `None` if the driver does not report it. NVIDIA's driver never does.
    pub hops: Option<u32>,
    /// Performance rank of the link, 0 for the fastest kind; `None` if the driver does not report it. AMD's
    /// driver never does.
    pub performance_rank: Option<u32>,
}

impl PeerLink {
    /// Returns the link from the GPU with the index `own` to the GPU with the index `peer`.
    #[must_use]
    pub fn query(driver: &DriverApi, own: usize, peer: usize) -> Self {
        let has_access = has_access(driver, own, peer);
        let cuda = |attribute| cuda_attribute(driver, attribute, own, peer);
        let hip = hip_link(driver, own, peer);
        Self {
            peer,
            has_access,
            kind: match &hip {
                Some(hip) => hip_kind(hip.number),
                None => cuda_kind(cuda(link::CUDA_NATIVE_ATOMICS), has_access),
            },
            hops: hip.map(|hip| hip.hops),
            performance_rank: cuda(link::CUDA_PERFORMANCE_RANK),
        }
    }
}

/// Link as the HIP runtime reports it.
struct HipLink {
    /// Link type, a `hsa_amd_link_info_type_t`.
    number: u32,
    hops: u32,
}

fn has_access(driver: &DriverApi, own: usize, peer: usize) -> bool {
    let mut result: c_int = 0;
    driver.can_access_peer.is_some_and(|get| {
        // SAFETY: the output pointer is valid for writes; the driver rejects indices without a device.
        let status = unsafe { get(&raw mut result, own as c_int, peer as c_int) };
        status == code::SUCCESS && result != 0
    })
}

/// Returns a link between AMD GPUs; `None` if the runtime does not report it.
fn hip_link(driver: &DriverApi, own: usize, peer: usize) -> Option<HipLink> {
    let mut hip = HipLink { number: 0, hops: 0 };
    let get = driver.hip_link?;
    // SAFETY: both output pointers are valid for writes; the driver rejects indices without a device.
    let status =
        unsafe { get(own as c_int, peer as c_int, &raw mut hip.number, &raw mut hip.hops) };
    (status == code::SUCCESS).then_some(hip)
}

fn hip_kind(number: u32) -> PeerLinkKind {
    match number {
        link::HIP_XGMI => PeerLinkKind::Xgmi,
        link::HIP_PCIE => PeerLinkKind::Pcie,
        _ => PeerLinkKind::Unknown,
    }
}

/// Returns a CUDA attribute of a link; `None` if the driver does not report the attribute.
fn cuda_attribute(driver: &DriverApi, attribute: c_int, own: usize, peer: usize) -> Option<u32> {
    let mut value: c_int = 0;
    let get = driver.cuda_link_attribute?;
    // SAFETY: the output pointer is valid for writes; the driver rejects indices without a device.
    let status = unsafe { get(&raw mut value, attribute, own as c_int, peer as c_int) };
    if status == code::SUCCESS { value.try_into().ok() } else { None }
}

/// Returns the kind of a link between NVIDIA GPUs. The driver does not report it: NVLink executes atomic
/// operations on the memory of another GPU natively, and PCIe does not.
fn cuda_kind(native_atomics: Option<u32>, has_access: bool) -> PeerLinkKind {
    match native_atomics {
        Some(1..) => PeerLinkKind::NvLink,
        Some(0) if has_access => PeerLinkKind::Pcie,
        Some(0) | None => PeerLinkKind::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hip_link_types_are_those_of_the_hsa_runtime() {
        let kinds = [0, 1, 2, 3, 4, 5].map(hip_kind);
        let unknown = PeerLinkKind::Unknown;
        assert_eq!(
            kinds,
            [unknown, unknown, PeerLinkKind::Pcie, unknown, PeerLinkKind::Xgmi, unknown]
        );
    }

    #[test]
    fn native_atomics_distinguish_nvlink_from_pcie() {
        assert_eq!(cuda_kind(Some(1), true), PeerLinkKind::NvLink);
        assert_eq!(cuda_kind(Some(0), true), PeerLinkKind::Pcie);
        assert_eq!(cuda_kind(Some(0), false), PeerLinkKind::Unknown);
        assert_eq!(cuda_kind(None, true), PeerLinkKind::Unknown);
    }
}
