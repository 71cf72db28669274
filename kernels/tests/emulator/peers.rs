//! Peer access between devices of one process: only `hipDeviceEnablePeerAccess` enables it, as in AMD's runtime.
//! Links between devices as the runtime reports them.

use device::gpu::{PeerLink, PeerLinkKind};
use hip_runtime_sys::{DriverStatus, code};

use crate::emulated_gpu;
use crate::gpu::{EmulatedGpu, KernelArg, LaunchShape};
use crate::injected_bugs::ROWS;

const INVALID_VALUE: DriverStatus = 1;
const ILLEGAL_ADDRESS: DriverStatus = 700;

/// Calls `hipCtxEnablePeerAccess`, which in HIP succeeds but does not enable peer access.
fn enable_context_peer_access(peer: &EmulatedGpu) -> DriverStatus {
    /// Type of the function `hipCtxEnablePeerAccess`.
    type EnablePeerAccessFn = unsafe extern "C" fn(hip_runtime_sys::DriverPtr, u32) -> DriverStatus;
    // SAFETY: the emulator's library is already loaded, and its function has this type.
    unsafe {
        let library = libloading::Library::new(emulated_gpu::library()).unwrap();
        let enable = library.get::<EnablePeerAccessFn>(b"hipCtxEnablePeerAccess").unwrap();
        enable(peer.context, 0)
    }
}

/// Launches a kernel on `gpu` that writes a thread count to the memory of `peer`; `peer` runs no kernel.
fn write_to_peer(gpu: &EmulatedGpu, peer: &EmulatedGpu) -> (DriverStatus, u32) {
    peer.select();
    let count = peer.upload(&[0u32; 3]);
    gpu.select();
    let kernel = gpu.kernel(ROWS, &[], "count_threads");
    let status = gpu.try_launch(kernel, LaunchShape(1, 64, 0), &[KernelArg::At(count)]);
    peer.select();
    (status, peer.download::<u32>(count)[0])
}

// The tests use separate devices, because a device rejects all calls after a memory access fault.

#[test]
fn device_peer_access_opens_peer_memory() {
    let (gpu, peer) = (EmulatedGpu::open_device(1), EmulatedGpu::open_device(2));
    let enable = gpu.driver.hip_peer_enable.unwrap();
    gpu.select();
    // SAFETY: the function accepts any device index and flags.
    unsafe {
        assert_eq!(enable(2, 1), INVALID_VALUE);
        assert_eq!(enable(1, 0), code::INVALID_DEVICE, "the device itself is no peer");
        assert_eq!(enable(99, 0), code::INVALID_DEVICE);
        assert_eq!(enable(2, 0), code::SUCCESS);
        assert_eq!(enable(2, 0), code::PEER_ACCESS_ALREADY_ENABLED);
    }
    let (status, count) = write_to_peer(&gpu, &peer);
    assert_eq!(status, code::SUCCESS);
    assert!(count > 0);
}

#[test]
fn context_peer_access_enables_nothing() {
    let (gpu, peer) = (EmulatedGpu::open_device(3), EmulatedGpu::open_device(4));
    gpu.select();
    assert_eq!(enable_context_peer_access(&peer), code::SUCCESS);
    assert_eq!(write_to_peer(&gpu, &peer), (ILLEGAL_ADDRESS, 0));
}

#[test]
fn links_are_checked_and_reported_as_in_amds_runtime() {
    let gpu = EmulatedGpu::open();
    let get = gpu.driver.hip_link.unwrap();
    let (mut number, mut hops) = (0, 0);
    // SAFETY: the function checks its arguments; pointers that are not null are valid for writes.
    let mut call = |own, peer| unsafe { get(own, peer, &raw mut number, &raw mut hops) };
    assert_eq!(call(0, 0), INVALID_VALUE, "a device has no link to itself");
    assert_eq!(call(0, -1), INVALID_VALUE);
    assert_eq!(call(0, 99), code::INVALID_DEVICE);
    assert_eq!(call(0, 1), code::SUCCESS);
    // SAFETY: the function rejects a null pointer.
    assert_eq!(unsafe { get(0, 1, std::ptr::null_mut(), &raw mut hops) }, INVALID_VALUE);
    let link = PeerLink::query(&gpu.driver, 0, 1);
    assert_eq!((link.kind, link.hops), (PeerLinkKind::Xgmi, Some(1)));
    assert!(link.has_access && link.performance_rank.is_none());
}

#[test]
fn link_is_unknown_without_the_optional_function() {
    let mut gpu = EmulatedGpu::open();
    gpu.driver.hip_link = None;
    let link = PeerLink::query(&gpu.driver, 0, 1);
    assert_eq!((link.has_access, link.kind, link.hops), (true, PeerLinkKind::Unknown, None));
}
