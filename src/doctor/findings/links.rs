//! Findings about the links of a GPU: to other GPUs, and to the host.

use super::FindingList;
use crate::doctor::report::{GpuReport, GpuVendorReport, LinkKindReport, PcieLink};

/// Adds the findings about the links of one GPU.
pub(super) fn links(list: &mut FindingList, vendor: &GpuVendorReport, gpu: &GpuReport) {
    peer_links(list, vendor, gpu);
    if let Some(link) = &gpu.pcie {
        pcie(list, gpu.index, link);
    }
}

fn peer_links(list: &mut FindingList, vendor: &GpuVendorReport, gpu: &GpuReport) {
    let index = gpu.index;
    let is_missing = |peer: usize| peer != index && !gpu.peers.contains(&peer);
    let missing: Vec<usize> =
        vendor.devices.iter().map(|peer| peer.index).filter(|&peer| is_missing(peer)).collect();
    if !missing.is_empty() {
        let what = format!(
            "GPU {index} has no peer access to GPU {}: all-reduces between them go through the host.",
            listed(&missing)
        );
        list.warn(what, "check xGMI or NVLink, and that IOMMU or ACS do not block peer access");
    }
    let by_pcie = peers_by(gpu, &[LinkKindReport::Pcie]);
    let direct = peers_by(gpu, &[LinkKindReport::Xgmi, LinkKindReport::NvLink]);
    if !by_pcie.is_empty() && !direct.is_empty() {
        let what = format!(
            "GPU {index} is connected to GPU {} by PCIe only, and to GPU {} by a faster link: all-reduces of a \
             group with both are as slow as PCIe.",
            listed(&by_pcie),
            listed(&direct)
        );
        list.warn(what, "select GPUs that are connected by xGMI or NVLink with --device-ids");
    }
}

/// Returns the GPUs whose memory `gpu` can access over links of the given kinds.
fn peers_by(gpu: &GpuReport, kinds: &[LinkKindReport]) -> Vec<usize> {
    let has_kind = gpu.links.iter().filter(|link| link.has_access && kinds.contains(&link.kind));
    has_kind.map(|link| link.peer).collect()
}

fn listed(indices: &[usize]) -> String {
    indices.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn pcie(list: &mut FindingList, index: usize, link: &PcieLink) {
    if link.width < link.max_width {
        let what = format!(
            "GPU {index} uses {} of {} PCIe lanes: weights load slowly.",
            link.width, link.max_width
        );
        list.warn(what, "reseat the card, or use another slot");
    }
    if let (Some(speed), Some(max)) = (link.speed_mt_s, link.max_speed_mt_s)
        && speed < max
    {
        let (speed, max) = (f64::from(speed) / 1e3, f64::from(max) / 1e3);
        let what = format!("GPU {index} uses {speed} of {max} GT/s of PCIe: weights load slowly.");
        let remedy = "check again under load, because an idle GPU may lower the speed; then check slot and BIOS";
        list.warn(what, remedy);
    }
}
