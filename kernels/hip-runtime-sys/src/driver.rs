//! Symbol table of the HIP runtime and the CUDA driver: devices, memory, streams, events, modules and graphs.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::symbol_table::table;
use crate::{DriverPtr, DriverStatus, GpuApi};

table! {
    /// Function table of the HIP runtime or the CUDA driver. In argument lists, `x out` is a pointer to which
    /// the function writes `x`.
    DriverApi {
        /// Arguments `(flags)`. Initialises the driver; must be the first driver call of a process.
        init: "hipInit" "cuInit" (c_uint);
        /// Arguments `(count out)`. Returns the number of devices.
        device_count: "hipGetDeviceCount" "cuDeviceGetCount" (*mut c_int);
        /// Arguments `(device out, index)`. Returns the handle of a device.
        device_get: "hipDeviceGet" "cuDeviceGet" (*mut c_int, c_int);
        /// Arguments `(text out, bytes, device)`. Writes the product name of a device, truncated to the
        /// buffer.
        device_name: "hipDeviceGetName" "cuDeviceGetName" (*mut c_char, c_int, c_int);
        /// Arguments `(value out, attribute number of the API, device)`. Returns an attribute; see
        /// [`DeviceAttribute`].
        device_attribute: "hipDeviceGetAttribute" "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
        /// Arguments `(context out, device)`. Returns the primary context of a device.
        context_retain: "hipDevicePrimaryCtxRetain" "cuDevicePrimaryCtxRetain" (*mut DriverPtr, c_int);
        /// Arguments `(context)`. Makes the context current on the calling thread.
        context_set: "hipCtxSetCurrent" "cuCtxSetCurrent" (DriverPtr);

        /// Arguments `(address out, bytes)`. Allocates device memory, aligned to 256 bytes.
        alloc: "hipMalloc" "cuMemAlloc_v2" (*mut DriverPtr, usize);
        /// Arguments `(address)`. Frees device memory.
        free: "hipFree" "cuMemFree_v2" (DriverPtr);
        /// Arguments `(address out, bytes, flags)`. Allocates pinned host memory for asynchronous copies.
        host_alloc: "hipHostMalloc" "cuMemHostAlloc" (*mut DriverPtr, usize, c_uint);
        /// Arguments `(address)`. Frees pinned host memory.
        host_free: "hipHostFree" "cuMemFreeHost" (DriverPtr);
        /// Arguments `(free bytes out, total bytes out)`. Returns the memory of the current device.
        mem_info: "hipMemGetInfo" "cuMemGetInfo_v2" (*mut usize, *mut usize);
        /// Arguments `(to, from, bytes, stream)`. Copies from the host to the device, asynchronously on the
        /// stream.
        copy_to_device: "hipMemcpyHtoDAsync" "cuMemcpyHtoDAsync_v2" (DriverPtr, *const c_void, usize, DriverPtr);
        /// Arguments `(to, from, bytes, stream)`. Copies from the device to the host, asynchronously on the
        /// stream.
        copy_to_host: "hipMemcpyDtoHAsync" "cuMemcpyDtoHAsync_v2" (DriverPtr, DriverPtr, usize, DriverPtr);
        /// Arguments `(to, from, bytes, stream)`. Copies within device memory, asynchronously on the stream.
        copy_on_device: "hipMemcpyDtoDAsync" "cuMemcpyDtoDAsync_v2" (DriverPtr, DriverPtr, usize, DriverPtr);
        /// Arguments `(to, byte, bytes, stream)`. Fills device memory with a byte, asynchronously on the
        /// stream.
        fill: "hipMemsetD8Async" "cuMemsetD8Async" (DriverPtr, u8, usize, DriverPtr);

        /// Arguments `(stream out, flags)`. Creates a stream.
        stream_create: "hipStreamCreateWithFlags" "cuStreamCreate" (*mut DriverPtr, c_uint);
        /// Arguments `(stream)`. Destroys a stream.
        stream_destroy: "hipStreamDestroy" "cuStreamDestroy_v2" (DriverPtr);
        /// Arguments `(stream)`. Blocks the host until all work on the stream has completed.
        stream_synchronize: "hipStreamSynchronize" "cuStreamSynchronize" (DriverPtr);
        /// Arguments `(stream, event, flags)`. Makes later work on the stream start after the event.
        stream_wait: "hipStreamWaitEvent" "cuStreamWaitEvent" (DriverPtr, DriverPtr, c_uint);

        /// Arguments `(event out, flags)`. Creates an event.
        event_create: "hipEventCreateWithFlags" "cuEventCreate" (*mut DriverPtr, c_uint);
        /// Arguments `(event, stream)`. Records the event, which completes when all work submitted to the
        /// stream before this call has completed.
        event_record: "hipEventRecord" "cuEventRecord" (DriverPtr, DriverPtr);
        /// Arguments `(event)`. Blocks the host until the event has completed.
        event_synchronize: "hipEventSynchronize" "cuEventSynchronize" (DriverPtr);
        /// Arguments `(milliseconds out, start, end)`. Returns the time between two events, which must be
        /// created without [`flag::EVENT_WITHOUT_TIME`].
        event_elapsed: "hipEventElapsedTime" "cuEventElapsedTime" (*mut f32, DriverPtr, DriverPtr);
        /// Arguments `(event)`. Destroys an event.
        event_destroy: "hipEventDestroy" "cuEventDestroy_v2" (DriverPtr);

        /// Arguments `(module out, image)`. Loads a compiled kernel module.
        module_load: "hipModuleLoadData" "cuModuleLoadData" (*mut DriverPtr, *const c_void);
        /// Arguments `(module)`. Unloads a kernel module.
        module_unload: "hipModuleUnload" "cuModuleUnload" (DriverPtr);
        /// Arguments `(function out, module, name)`. Returns a kernel of a module by its name.
        module_function: "hipModuleGetFunction" "cuModuleGetFunction" (*mut DriverPtr, DriverPtr, *const c_char);
        /// Arguments `(function, grid x y z, block x y z, dynamic shared memory in bytes, stream, arguments,
        /// null)`. Launches a kernel.
        launch: "hipModuleLaunchKernel" "cuLaunchKernel" (
            DriverPtr, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, DriverPtr, *mut DriverPtr, *mut DriverPtr,
        );

        /// Arguments `(stream, mode)`. Starts to capture launches on the stream into a graph.
        capture_begin: "hipStreamBeginCapture" "cuStreamBeginCapture_v2" (DriverPtr, c_int);
        /// Arguments `(stream, status out)`. Returns 0 if the stream is not captured, 1 during a capture, 2 if
        /// the capture is invalidated.
        capture_status: "hipStreamIsCapturing" "cuStreamIsCapturing" (DriverPtr, *mut c_int);
        /// Arguments `(stream, graph out)`. Ends the capture and returns the graph.
        capture_end: "hipStreamEndCapture" "cuStreamEndCapture" (DriverPtr, *mut DriverPtr);
        /// Arguments `(executable out, graph, flags)`. Creates an executable graph.
        graph_instantiate: "hipGraphInstantiateWithFlags" "cuGraphInstantiateWithFlags" (
            *mut DriverPtr, DriverPtr, u64,
        );
        /// Arguments `(executable, stream)`. Launches an executable graph on the stream.
        graph_launch: "hipGraphLaunch" "cuGraphLaunch" (DriverPtr, DriverPtr);
        /// Arguments `(graph)`. Destroys a captured graph.
        graph_destroy: "hipGraphDestroy" "cuGraphDestroy" (DriverPtr);
        /// Arguments `(executable)`. Destroys an executable graph.
        graph_executable_destroy: "hipGraphExecDestroy" "cuGraphExecDestroy" (DriverPtr);
    }
    optional {
        /// Arguments `(properties out, device)`. Writes the device properties, at most 1472 bytes; the
        /// architecture name is a C string at byte 1160.
        properties: "hipGetDevicePropertiesR0600" "" (*mut u8, c_int) -> DriverStatus;
        /// Arguments `(version out)`. Returns the version of the driver: HIP encodes 7.1.25424 as 70125424, CUDA
        /// encodes 13.0 as 13000.
        driver_version: "hipDriverGetVersion" "cuDriverGetVersion" (*mut c_int) -> DriverStatus;
        /// Arguments `(text out, bytes, device)`. Writes the PCI address of a device, such as `0000:c1:00.0`.
        pci_bus_id: "hipDeviceGetPCIBusId" "cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int) -> DriverStatus;
        /// Arguments `(code)`. Returns the name of an error code.
        hip_error_name: "hipGetErrorName" "" (DriverStatus) -> *const c_char;
        /// Arguments `(code, name out)`. Returns the name of an error code.
        cuda_error_name: "" "cuGetErrorName" (DriverStatus, *mut *const c_char) -> DriverStatus;
        /// Arguments `(function, attribute, value)`. Sets an attribute of a kernel. There is no HIP function,
        /// because HIP kernels need no opt-in for large dynamic shared memory.
        function_set: "" "cuFuncSetAttribute" (DriverPtr, c_int, c_int) -> DriverStatus;
        /// Arguments `(value out, attribute, function)`. Returns an attribute of a kernel. Attribute numbers
        /// are equal in HIP and CUDA: 1 = static shared memory in bytes, 3 = local (spilled) memory in bytes,
        /// 4 = registers per thread.
        function_get: "hipFuncGetAttribute" "cuFuncGetAttribute" (*mut c_int, c_int, DriverPtr) -> DriverStatus;
        /// Arguments `(event, stream, flags)`. Records the event. With [`flag::EVENT_RECORD_EXTERNAL`], a
        /// capture turns the call into an event record node, which every replay executes.
        event_record_with: "hipEventRecordWithFlags" "cuEventRecordWithFlags" (DriverPtr, DriverPtr, c_uint) -> DriverStatus;
        /// Arguments `(config, function, arguments, null)`. Launches a kernel with launch attributes.
        launch_ex: "" "cuLaunchKernelEx" (*const LaunchConfig, DriverPtr, *mut DriverPtr, *mut DriverPtr) -> DriverStatus;
        /// Arguments `(map out, data type, rank, address, sizes, strides in bytes, box, element strides,
        /// interleave, swizzle, promotion, fill)`. Encodes a TMA descriptor (tensor map) of a tensor.
        tensor_map_encode: "" "cuTensorMapEncodeTiled" (
            DriverPtr, c_int, c_uint, DriverPtr, *const u64, *const u64, *const c_uint, *const c_uint, c_int, c_int,
            c_int, c_int,
        ) -> DriverStatus;
        /// Arguments `(address out, bytes, flags)`. Allocates device memory. With [`flag::MALLOC_UNCACHED`],
        /// a running kernel sees writes of other devices to the memory. On NVIDIA GPUs, all device memory has
        /// this property.
        alloc_with: "hipExtMallocWithFlags" "" (*mut DriverPtr, usize, c_uint) -> DriverStatus;
        /// Arguments `(handle out, address)`. Returns the IPC handle by which other processes of the host
        /// open the allocation.
        ipc_handle: "hipIpcGetMemHandle" "cuIpcGetMemHandle" (*mut IpcHandle, DriverPtr) -> DriverStatus;
        /// Arguments `(address out, handle, flags)`. Opens an IPC handle; not allowed in the process that
        /// allocated the memory.
        ipc_open: "hipIpcOpenMemHandle" "cuIpcOpenMemHandle_v2" (*mut DriverPtr, IpcHandle, c_uint) -> DriverStatus;
        /// Arguments `(result out, device, peer device)`. Returns 1 if the device can access the memory of the
        /// peer device.
        can_access_peer: "hipDeviceCanAccessPeer" "cuDeviceCanAccessPeer" (*mut c_int, c_int, c_int) -> DriverStatus;
        /// Arguments `(device, peer device, link type out, hop count out)`. Returns the type of the link between
        /// two devices (see [`link`]) and its number of hops.
        hip_link: "hipExtGetLinkTypeAndHopCount" "" (c_int, c_int, *mut u32, *mut u32) -> DriverStatus;
        /// Arguments `(value out, attribute, device, peer device)`. Returns an attribute of the link between two
        /// devices; see [`link`].
        cuda_link_attribute: "" "cuDeviceGetP2PAttribute" (*mut c_int, c_int, c_int, c_int) -> DriverStatus;
        /// Arguments `(index of the peer device, flags 0)`. Enables access from the current device to the
        /// memory of the peer device. HIP also exports `hipCtxEnablePeerAccess`, but that function does
        /// nothing.
        hip_peer_enable: "hipDeviceEnablePeerAccess" "" (c_int, c_uint) -> DriverStatus;
        /// Arguments `(context of the peer device, flags 0)`. Enables access from the current device to the
        /// memory of the peer device.
        cuda_peer_enable: "" "cuCtxEnablePeerAccess" (DriverPtr, c_uint) -> DriverStatus;
    }
}

/// IPC handle of a device allocation, with which other processes of the host open the allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct IpcHandle(pub [u8; 64]);

/// Launch configuration for [`DriverApi::launch_ex`] (`CUlaunchConfig`).
#[derive(Debug)]
#[repr(C)]
pub struct LaunchConfig {
    /// Grid dimensions, in thread blocks.
    pub grid: [c_uint; 3],
    /// Block dimensions, in threads.
    pub block: [c_uint; 3],
    /// Dynamic shared memory per thread block of the launch, in bytes.
    pub shared_bytes: c_uint,
    /// Stream on which the kernel is launched.
    pub stream: DriverPtr,
    /// Array of launch attributes with `attribute_count` entries.
    pub attributes: *const LaunchAttribute,
    /// Number of entries in `attributes`.
    pub attribute_count: c_uint,
}

/// Attribute of a kernel launch (`CUlaunchAttribute`).
#[derive(Debug, Clone, Copy)]
#[repr(C, align(8))]
pub struct LaunchAttribute {
    /// Number of the attribute in the CUDA driver API.
    pub id: c_int,
    pad: c_int,
    /// Value of the attribute; a scalar is stored in the first words.
    pub value: [c_uint; 16],
}

impl LaunchAttribute {
    /// Programmatic dependent launch: the kernel may start before the previous kernel has ended, and waits
    /// for it with `griddepcontrol.wait`.
    #[must_use]
    pub const fn overlap_predecessor() -> Self {
        let mut value = [0; 16];
        value[0] = 1;
        Self { id: 6, pad: 0, value }
    }

    /// Thread block cluster of `blocks` adjacent thread blocks, which are co-scheduled and can access each
    /// other's shared memory.
    #[must_use]
    pub const fn clusters(blocks: c_uint) -> Self {
        let mut value = [0; 16];
        (value[0], value[1], value[2]) = (blocks, 1, 1);
        Self { id: 4, pad: 0, value }
    }
}

/// Device attribute that HIP and CUDA identify by different numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceAttribute {
    /// Number of threads per warp (NVIDIA) or wavefront (AMD).
    WarpSize,
    /// Number of streaming multiprocessors (NVIDIA) or compute units (AMD).
    Multiprocessors,
    /// Maximum dynamic shared memory per thread block, in bytes. On NVIDIA, a kernel must opt in to this
    /// size.
    SharedBytesPerBlock,
    /// Size of the L2 cache of the device, in bytes.
    L2Bytes,
    /// Whether the GPU and the host share one memory.
    Integrated,
    /// Major compute capability (NVIDIA).
    CapabilityMajor,
    /// Minor compute capability (NVIDIA).
    CapabilityMinor,
}

impl DeviceAttribute {
    /// Returns the number of the attribute in the API `api`.
    #[must_use]
    pub const fn number(self, api: GpuApi) -> c_int {
        match self {
            Self::WarpSize => api.pick(87, 10),
            Self::Multiprocessors => api.pick(63, 16),
            Self::SharedBytesPerBlock => api.pick(74, 97),
            Self::L2Bytes => api.pick(19, 38),
            Self::Integrated => api.pick(16, 18),
            Self::CapabilityMajor => api.pick(23, 75),
            Self::CapabilityMinor => api.pick(61, 76),
        }
    }
}

/// Result codes that are equal in HIP and CUDA.
pub mod code {
    use crate::DriverStatus;

    /// The function has succeeded.
    pub const SUCCESS: DriverStatus = 0;
    /// The device has too little free memory.
    pub const OUT_OF_MEMORY: DriverStatus = 2;
    /// The driver has found no device.
    pub const NO_DEVICE: DriverStatus = 100;
    /// Invalid device index. HIP also returns this code from the first call if there is no device.
    pub const INVALID_DEVICE: DriverStatus = 101;
    /// Peer access between the devices is already enabled.
    pub const PEER_ACCESS_ALREADY_ENABLED: DriverStatus = 704;
    /// The operation is not allowed during stream capture.
    pub const CAPTURE_UNSUPPORTED: DriverStatus = 900;
}

/// Flags and modes that are equal in HIP and CUDA.
pub mod flag {
    use std::ffi::{c_int, c_uint};

    /// Stream flag: the stream does not synchronise with the default stream.
    pub const STREAM_NON_BLOCKING: c_uint = 1;
    /// Event flag: the event records a timestamp.
    pub const EVENT_TIMED: c_uint = 0;
    /// Event flag: the event records no timestamp, which makes recording cheaper.
    pub const EVENT_WITHOUT_TIME: c_uint = 2;
    /// Event record flag: the record becomes a node of a captured graph, and code outside of the graph can
    /// wait for it.
    pub const EVENT_RECORD_EXTERNAL: c_uint = 1;
    /// Host allocation flag: all contexts can use the pinned memory.
    pub const HOST_PORTABLE: c_uint = 1;
    /// IPC flag: opening the handle enables peer access to the device that owns the memory.
    pub const IPC_ENABLE_PEER_ACCESS: c_uint = 1;
    /// AMD allocation flag: the device does not cache the memory.
    pub const MALLOC_UNCACHED: c_uint = 3;
    /// Stream capture mode: other threads may call functions that are not allowed during capture.
    pub const CAPTURE_THREAD_LOCAL: c_int = 1;
    /// Function attribute: maximum dynamic shared memory per thread block, in bytes.
    pub const FUNCTION_MAX_DYNAMIC_SHARED: c_int = 8;
}

/// Types and attributes of links between devices.
pub mod link {
    use std::ffi::c_int;

    /// HIP link type (`hsa_amd_link_info_type_t`): PCIe.
    pub const HIP_PCIE: u32 = 2;
    /// HIP link type (`hsa_amd_link_info_type_t`): xGMI.
    pub const HIP_XGMI: u32 = 4;
    /// CUDA link attribute: performance rank of the link; 0 = the fastest kind.
    pub const CUDA_PERFORMANCE_RANK: c_int = 1;
    /// CUDA link attribute: 1 if the link executes all atomic operations natively.
    pub const CUDA_NATIVE_ATOMICS: c_int = 3;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launch_config_layout_matches_cuda_header() {
        assert_eq!(size_of::<LaunchAttribute>(), 72);
        assert_eq!(std::mem::offset_of!(LaunchConfig, stream), 32);
        assert_eq!(std::mem::offset_of!(LaunchConfig, attribute_count), 48);
        assert_eq!(size_of::<LaunchConfig>(), 56);
    }
}
