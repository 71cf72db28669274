//! Symbol table of the HIP runtime and the CUDA driver: devices, memory, streams, events, modules, graphs.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::symbol_table::table;
use crate::{DriverPtr, DriverStatus, GpuApi};

table! {
    /// Function table of the HIP runtime or the CUDA driver.
    DriverApi {
        /// `(flags)`: initialises the driver; must be the first call of a process.
        init: "hipInit" "cuInit" (c_uint);
        /// `(count out)`.
        device_count: "hipGetDeviceCount" "cuDeviceGetCount" (*mut c_int);
        /// `(device out, index)`.
        device_get: "hipDeviceGet" "cuDeviceGet" (*mut c_int, c_int);
        /// `(text out, bytes, device)`.
        device_name: "hipDeviceGetName" "cuDeviceGetName" (*mut c_char, c_int, c_int);
        /// `(value out, attribute number of the API, device)`; see [`DeviceAttribute`].
        device_attribute: "hipDeviceGetAttribute" "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
        /// `(context out, device)`.
        context_retain: "hipDevicePrimaryCtxRetain" "cuDevicePrimaryCtxRetain" (*mut DriverPtr, c_int);
        /// `(context)`: makes the context current on the calling thread.
        context_set: "hipCtxSetCurrent" "cuCtxSetCurrent" (DriverPtr);

        /// `(address out, bytes)`: device memory, aligned to 256 bytes.
        alloc: "hipMalloc" "cuMemAlloc_v2" (*mut DriverPtr, usize);
        /// `(address)`.
        free: "hipFree" "cuMemFree_v2" (DriverPtr);
        /// `(address out, bytes, flags)`: pinned host memory for asynchronous copies.
        host_alloc: "hipHostMalloc" "cuMemHostAlloc" (*mut DriverPtr, usize, c_uint);
        /// `(address)`.
        host_free: "hipHostFree" "cuMemFreeHost" (DriverPtr);
        /// `(free bytes out, total bytes out)`.
        mem_info: "hipMemGetInfo" "cuMemGetInfo_v2" (*mut usize, *mut usize);
        /// `(to, from, bytes, stream)`.
        copy_to_device: "hipMemcpyHtoDAsync" "cuMemcpyHtoDAsync_v2" (DriverPtr, *const c_void, usize, DriverPtr);
        /// `(to, from, bytes, stream)`.
        copy_to_host: "hipMemcpyDtoHAsync" "cuMemcpyDtoHAsync_v2" (DriverPtr, DriverPtr, usize, DriverPtr);
        /// `(to, from, bytes, stream)`.
        copy_on_device: "hipMemcpyDtoDAsync" "cuMemcpyDtoDAsync_v2" (DriverPtr, DriverPtr, usize, DriverPtr);
        /// `(to, byte, bytes, stream)`.
        fill: "hipMemsetD8Async" "cuMemsetD8Async" (DriverPtr, u8, usize, DriverPtr);

        /// `(stream out, flags)`.
        stream_create: "hipStreamCreateWithFlags" "cuStreamCreate" (*mut DriverPtr, c_uint);
        /// `(stream)`.
        stream_destroy: "hipStreamDestroy" "cuStreamDestroy_v2" (DriverPtr);
        /// `(stream)`: blocks the host until all work on the stream has completed.
        stream_synchronize: "hipStreamSynchronize" "cuStreamSynchronize" (DriverPtr);
        /// `(stream, event, flags)`: later work on the stream starts after the event.
        stream_wait: "hipStreamWaitEvent" "cuStreamWaitEvent" (DriverPtr, DriverPtr, c_uint);

        /// `(event out, flags)`.
        event_create: "hipEventCreateWithFlags" "cuEventCreate" (*mut DriverPtr, c_uint);
        /// `(event, stream)`: the event completes after all work submitted to the stream so far.
        event_record: "hipEventRecord" "cuEventRecord" (DriverPtr, DriverPtr);
        /// `(event)`: blocks the host until the event has completed.
        event_synchronize: "hipEventSynchronize" "cuEventSynchronize" (DriverPtr);
        /// `(milliseconds out, start, end)`; both events must be created without
        /// [`flag::EVENT_WITHOUT_TIME`].
        event_elapsed: "hipEventElapsedTime" "cuEventElapsedTime" (*mut f32, DriverPtr, DriverPtr);
        /// `(event)`.
        event_destroy: "hipEventDestroy" "cuEventDestroy_v2" (DriverPtr);

        /// `(module out, image)`.
        module_load: "hipModuleLoadData" "cuModuleLoadData" (*mut DriverPtr, *const c_void);
        /// `(module)`.
        module_unload: "hipModuleUnload" "cuModuleUnload" (DriverPtr);
        /// `(function out, module, name)`.
        module_function: "hipModuleGetFunction" "cuModuleGetFunction" (*mut DriverPtr, DriverPtr, *const c_char);
        /// `(function, grid x y z, block x y z, dynamic shared memory in bytes, stream, arguments, null)`.
        launch: "hipModuleLaunchKernel" "cuLaunchKernel" (
            DriverPtr, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, DriverPtr, *mut DriverPtr, *mut DriverPtr,
        );

        /// `(stream, mode)`.
        capture_begin: "hipStreamBeginCapture" "cuStreamBeginCapture_v2" (DriverPtr, c_int);
        /// `(stream, graph out)`.
        capture_end: "hipStreamEndCapture" "cuStreamEndCapture" (DriverPtr, *mut DriverPtr);
        /// `(executable out, graph, flags)`.
        graph_instantiate: "hipGraphInstantiateWithFlags" "cuGraphInstantiateWithFlags" (
            *mut DriverPtr, DriverPtr, u64,
        );
        /// `(executable, stream)`.
        graph_launch: "hipGraphLaunch" "cuGraphLaunch" (DriverPtr, DriverPtr);
        /// `(graph)`.
        graph_destroy: "hipGraphDestroy" "cuGraphDestroy" (DriverPtr);
        /// `(executable)`.
        graph_executable_destroy: "hipGraphExecDestroy" "cuGraphExecDestroy" (DriverPtr);
    }
    optional {
        /// `(properties out, device)`: writes at most 1472 bytes; the architecture name is a C string at byte
        /// 1160.
        properties: "hipGetDevicePropertiesR0600" "" (*mut u8, c_int) -> DriverStatus;
        /// `(code)`: returns the name of an error code.
        hip_error_name: "hipGetErrorName" "" (DriverStatus) -> *const c_char;
        /// `(code, name out)`.
        cuda_error_name: "" "cuGetErrorName" (DriverStatus, *mut *const c_char) -> DriverStatus;
        /// `(function, attribute, value)`; HIP needs no opt-in for large dynamic shared memory.
        function_set: "" "cuFuncSetAttribute" (DriverPtr, c_int, c_int) -> DriverStatus;
        /// `(value out, attribute, function)`; attribute numbers are the same in both APIs: 1 = static shared
        /// memory in bytes, 3 = local (spilled) memory in bytes, 4 = registers per thread.
        function_get: "hipFuncGetAttribute" "cuFuncGetAttribute" (*mut c_int, c_int, DriverPtr) -> DriverStatus;
        /// `(event, stream, flags)`: with [`flag::EVENT_RECORD_EXTERNAL`] a capture turns the call into an
        /// event record node, which every replay executes.
        event_record_with: "hipEventRecordWithFlags" "cuEventRecordWithFlags" (DriverPtr, DriverPtr, c_uint) -> DriverStatus;
        /// `(config, function, arguments, null)`.
        launch_ex: "" "cuLaunchKernelEx" (*const LaunchConfig, DriverPtr, *mut DriverPtr, *mut DriverPtr) -> DriverStatus;
        /// `(map out, data type, rank, address, sizes, strides in bytes, box, element strides,
        /// interleave, swizzle, promotion, fill)`: encodes a TMA descriptor (tensor map) of a tensor.
        tensor_map_encode: "" "cuTensorMapEncodeTiled" (
            DriverPtr, c_int, c_uint, DriverPtr, *const u64, *const u64, *const c_uint, *const c_uint, c_int, c_int,
            c_int, c_int,
        ) -> DriverStatus;
        /// `(address out, bytes, flags)`: with [`flag::MALLOC_UNCACHED`] a running kernel sees writes of
        /// other devices; on NVIDIA all device memory behaves so.
        alloc_with: "hipExtMallocWithFlags" "" (*mut DriverPtr, usize, c_uint) -> DriverStatus;
        /// `(handle out, address)`: returns the IPC handle by which other processes of the host open the
        /// allocation.
        ipc_handle: "hipIpcGetMemHandle" "cuIpcGetMemHandle" (*mut IpcHandle, DriverPtr) -> DriverStatus;
        /// `(address out, handle, flags)`: opens an IPC handle; not allowed in the process that allocated the
        /// memory.
        ipc_open: "hipIpcOpenMemHandle" "cuIpcOpenMemHandle_v2" (*mut DriverPtr, IpcHandle, c_uint) -> DriverStatus;
        /// `(context of the peer device, flags 0)`: enables peer access from the current device to the peer's
        /// memory.
        peer_enable: "hipCtxEnablePeerAccess" "cuCtxEnablePeerAccess" (DriverPtr, c_uint) -> DriverStatus;
    }
}

/// IPC handle of a device allocation, which can be sent to other processes of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct IpcHandle(pub [u8; 64]);

/// Launch configuration of [`DriverApi::launch_ex`].
#[derive(Debug)]
#[repr(C)]
pub struct LaunchConfig {
    /// Grid dimensions, in thread blocks.
    pub grid: [c_uint; 3],
    /// Block dimensions, in threads.
    pub block: [c_uint; 3],
    /// Dynamic shared memory per thread block, in bytes.
    pub shared_bytes: c_uint,
    /// Stream of the launch.
    pub stream: DriverPtr,
    /// Array of `attribute_count` launch attributes.
    pub attributes: *const LaunchAttribute,
    /// Number of launch attributes.
    pub attribute_count: c_uint,
}

/// Attribute of a kernel launch.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(8))]
pub struct LaunchAttribute {
    /// Attribute number of the CUDA driver.
    pub id: c_int,
    pad: c_int,
    /// Value of the attribute; scalars are in the first words.
    pub value: [c_uint; 16],
}

impl LaunchAttribute {
    /// Programmatic dependent launch: the kernel may start before the preceding kernel has ended and waits
    /// for it itself (`griddepcontrol.wait`).
    #[must_use]
    pub const fn overlap_predecessor() -> Self {
        let mut value = [0; 16];
        value[0] = 1;
        Self { id: 6, pad: 0, value }
    }

    /// Thread block cluster of `blocks` adjacent blocks: they are co-scheduled and access each other's shared
    /// memory.
    #[must_use]
    pub const fn clusters(blocks: c_uint) -> Self {
        let mut value = [0; 16];
        (value[0], value[1], value[2]) = (blocks, 1, 1);
        Self { id: 4, pad: 0, value }
    }
}

/// Device attribute that both APIs have, under different numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceAttribute {
    /// Threads per warp (NVIDIA) or wavefront (AMD).
    WarpSize,
    /// Number of streaming multiprocessors (NVIDIA) or compute units (AMD).
    Multiprocessors,
    /// Maximum dynamic shared memory per thread block in bytes; on NVIDIA the opt-in maximum.
    SharedBytesPerBlock,
    /// Size of the L2 cache, in bytes.
    L2Bytes,
    /// Major compute capability (NVIDIA).
    CapabilityMajor,
    /// Minor compute capability (NVIDIA).
    CapabilityMinor,
}

impl DeviceAttribute {
    /// Returns the attribute number in `api`.
    #[must_use]
    pub const fn number(self, api: GpuApi) -> c_int {
        match self {
            Self::WarpSize => api.pick(87, 10),
            Self::Multiprocessors => api.pick(63, 16),
            Self::SharedBytesPerBlock => api.pick(74, 97),
            Self::L2Bytes => api.pick(19, 38),
            Self::CapabilityMajor => api.pick(23, 75),
            Self::CapabilityMinor => api.pick(61, 76),
        }
    }
}

/// Result codes that are the same in both APIs.
pub mod code {
    use crate::DriverStatus;

    /// Success.
    pub const SUCCESS: DriverStatus = 0;
    /// Out of device memory.
    pub const OUT_OF_MEMORY: DriverStatus = 2;
    /// The driver finds no device.
    pub const NO_DEVICE: DriverStatus = 100;
    /// Invalid device ordinal; HIP also returns it from the first call if there is no device at all.
    pub const INVALID_DEVICE: DriverStatus = 101;
    /// Peer access between the devices is already enabled.
    pub const PEER_ACCESS_ALREADY_ENABLED: DriverStatus = 704;
    /// The operation is not permitted during stream capture.
    pub const CAPTURE_UNSUPPORTED: DriverStatus = 900;
}

/// Flags and modes that are the same in both APIs.
pub mod flag {
    use std::ffi::{c_int, c_uint};

    /// The stream does not synchronise with the default stream.
    pub const STREAM_NON_BLOCKING: c_uint = 1;
    /// The event records a timestamp.
    pub const EVENT_TIMED: c_uint = 0;
    /// The event records no timestamp, which makes it cheaper.
    pub const EVENT_WITHOUT_TIME: c_uint = 2;
    /// Event record that becomes a node of a captured graph and can be waited for outside of the graph.
    pub const EVENT_RECORD_EXTERNAL: c_uint = 1;
    /// Pinned memory that is usable by all contexts.
    pub const HOST_PORTABLE: c_uint = 1;
    /// Opening an IPC handle enables peer access to the device that owns the memory.
    pub const IPC_ENABLE_PEER_ACCESS: c_uint = 1;
    /// AMD: device memory that the device does not cache.
    pub const MALLOC_UNCACHED: c_uint = 3;
    /// Capture mode: other threads may make unsafe API calls during the capture.
    pub const CAPTURE_THREAD_LOCAL: c_int = 1;
    /// Function attribute: maximum dynamic shared memory per thread block, in bytes.
    pub const FUNCTION_MAX_DYNAMIC_SHARED: c_int = 8;
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
