//! The driver: devices, memory, streams, events, modules, graphs.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::symbol_table::table;
use crate::{DriverPtr, DriverStatus, GpuApi};

table! {
    /// The driver of one vendor.
    DriverApi {
        /// `(flags)`: first call of a process.
        init: "hipInit" "cuInit" (c_uint);
        /// `(count out)`.
        device_count: "hipGetDeviceCount" "cuDeviceGetCount" (*mut c_int);
        /// `(device out, index)`.
        device_get: "hipDeviceGet" "cuDeviceGet" (*mut c_int, c_int);
        /// `(text out, bytes, device)`.
        device_name: "hipDeviceGetName" "cuDeviceGetName" (*mut c_char, c_int, c_int);
        /// `(value out, attribute number of the vendor, device)`; see [`DeviceAttribute`].
        device_attribute: "hipDeviceGetAttribute" "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
        /// `(context out, device)`.
        context_retain: "hipDevicePrimaryCtxRetain" "cuDevicePrimaryCtxRetain" (*mut DriverPtr, c_int);
        /// `(context)`: current on the calling thread from now on.
        context_set: "hipCtxSetCurrent" "cuCtxSetCurrent" (DriverPtr);

        /// `(address out, bytes)`: aligned to 256.
        alloc: "hipMalloc" "cuMemAlloc_v2" (*mut DriverPtr, usize);
        /// `(address)`.
        free: "hipFree" "cuMemFree_v2" (DriverPtr);
        /// `(address out, bytes, flags)`: host memory that the device copies from and to by itself.
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
        /// `(stream)`: waits for all launches.
        stream_synchronize: "hipStreamSynchronize" "cuStreamSynchronize" (DriverPtr);
        /// `(stream, event, flags)`: launches from now on come after the event.
        stream_wait: "hipStreamWaitEvent" "cuStreamWaitEvent" (DriverPtr, DriverPtr, c_uint);

        /// `(event out, flags)`.
        event_create: "hipEventCreateWithFlags" "cuEventCreate" (*mut DriverPtr, c_uint);
        /// `(event, stream)`: the event passes after all launches so far.
        event_record: "hipEventRecord" "cuEventRecord" (DriverPtr, DriverPtr);
        /// `(event)`: waits for it.
        event_synchronize: "hipEventSynchronize" "cuEventSynchronize" (DriverPtr);
        /// `(milliseconds out, from, to)`; both made without [`flag::EVENT_WITHOUT_TIME`].
        event_elapsed: "hipEventElapsedTime" "cuEventElapsedTime" (*mut f32, DriverPtr, DriverPtr);
        /// `(event)`.
        event_destroy: "hipEventDestroy" "cuEventDestroy_v2" (DriverPtr);

        /// `(module out, image)`.
        module_load: "hipModuleLoadData" "cuModuleLoadData" (*mut DriverPtr, *const c_void);
        /// `(module)`.
        module_unload: "hipModuleUnload" "cuModuleUnload" (DriverPtr);
        /// `(function out, module, name)`.
        module_function: "hipModuleGetFunction" "cuModuleGetFunction" (*mut DriverPtr, DriverPtr, *const c_char);
        /// `(function, grid x y z, block x y z, dynamic shared bytes, stream, arguments, null)`.
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
        /// `(properties out, device)`: the name of the architecture is text at byte 1160 of at most 1472.
        properties: "hipGetDevicePropertiesR0600" "" (*mut u8, c_int) -> DriverStatus;
        /// `(code)`: the name of an error.
        hip_error_name: "hipGetErrorName" "" (DriverStatus) -> *const c_char;
        /// `(code, name out)`.
        cuda_error_name: "" "cuGetErrorName" (DriverStatus, *mut *const c_char) -> DriverStatus;
        /// `(function, attribute, value)`; AMD needs no leave for large dynamic shared memory.
        function_set: "" "cuFuncSetAttribute" (DriverPtr, c_int, c_int) -> DriverStatus;
        /// `(value out, attribute, function)`; attribute numbers are equal: 1 static shared bytes,
        /// 3 spilled bytes, 4 registers.
        function_get: "hipFuncGetAttribute" "cuFuncGetAttribute" (*mut c_int, c_int, DriverPtr) -> DriverStatus;
        /// `(event, stream, flags)`: with [`flag::EVENT_RECORD_EXTERNAL`] a capture keeps the record, and
        /// every replay makes it.
        event_record_with: "hipEventRecordWithFlags" "cuEventRecordWithFlags" (DriverPtr, DriverPtr, c_uint) -> DriverStatus;
        /// `(config, function, arguments, null)`.
        launch_ex: "" "cuLaunchKernelEx" (*const LaunchConfig, DriverPtr, *mut DriverPtr, *mut DriverPtr) -> DriverStatus;
        /// `(map out, data type, rank, address, sizes, strides in bytes, box, element strides,
        /// interleave, swizzle, promotion, fill)`: describes a tensor to the copy engine of an SM.
        tensor_map_encode: "" "cuTensorMapEncodeTiled" (
            DriverPtr, c_int, c_uint, DriverPtr, *const u64, *const u64, *const c_uint, *const c_uint, c_int, c_int,
            c_int, c_int,
        ) -> DriverStatus;
        /// `(address out, bytes, flags)`: with [`flag::MALLOC_UNCACHED`] what other devices write is seen while a kernel
        /// runs; NVIDIA's memory always is like that.
        alloc_with: "hipExtMallocWithFlags" "" (*mut DriverPtr, usize, c_uint) -> DriverStatus;
        /// `(handle out, address)`: by what other processes of the host open this allocation.
        ipc_handle: "hipIpcGetMemHandle" "cuIpcGetMemHandle" (*mut IpcHandle, DriverPtr) -> DriverStatus;
        /// `(address out, handle, flags)`: in any process but the one that allocated.
        ipc_open: "hipIpcOpenMemHandle" "cuIpcOpenMemHandle_v2" (*mut DriverPtr, IpcHandle, c_uint) -> DriverStatus;
        /// `(context of the other device, flags 0)`: kernels of this one reach its memory from now on.
        peer_enable: "hipCtxEnablePeerAccess" "cuCtxEnablePeerAccess" (DriverPtr, c_uint) -> DriverStatus;
    }
}

/// An allocation, in words that other processes can be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct IpcHandle(pub [u8; 64]);

/// How a kernel is launched by [`DriverApi::launch_ex`].
#[derive(Debug)]
#[repr(C)]
pub struct LaunchConfig {
    /// Blocks.
    pub grid: [c_uint; 3],
    /// Threads of a block.
    pub block: [c_uint; 3],
    /// Dynamic shared memory.
    pub shared_bytes: c_uint,
    /// The stream.
    pub stream: DriverPtr,
    /// `attribute_count` attributes.
    pub attributes: *const LaunchAttribute,
    /// Their number.
    pub attribute_count: c_uint,
}

/// One attribute of a launch.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(8))]
pub struct LaunchAttribute {
    /// Which.
    pub id: c_int,
    pad: c_int,
    /// Its value; the first word holds numbers.
    pub value: [c_uint; 16],
}

impl LaunchAttribute {
    /// A kernel may begin before the one in front of it has ended; it waits for it by itself.
    #[must_use]
    pub const fn overlap_predecessor() -> Self {
        let mut value = [0; 16];
        value[0] = 1;
        Self { id: 6, pad: 0, value }
    }

    /// So many blocks beside each other run at once, and reach each other's shared memory.
    #[must_use]
    pub const fn clusters(blocks: c_uint) -> Self {
        let mut value = [0; 16];
        (value[0], value[1], value[2]) = (blocks, 1, 1);
        Self { id: 4, pad: 0, value }
    }
}

/// A property of a device that both vendors number, differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceAttribute {
    /// Threads of a wave.
    WarpSize,
    /// Compute units or streaming multiprocessors.
    Multiprocessors,
    /// Dynamic shared memory a block may have, without (AMD) or with leave (NVIDIA).
    SharedBytesPerBlock,
    /// Bytes of the level-2 cache.
    L2Bytes,
    /// First part of NVIDIA's architecture number.
    CapabilityMajor,
    /// Second part of NVIDIA's architecture number.
    CapabilityMinor,
}

impl DeviceAttribute {
    /// The vendor's number.
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

/// Result codes, equal on both sides.
pub mod code {
    use crate::DriverStatus;

    /// Done.
    pub const SUCCESS: DriverStatus = 0;
    /// No such amount of memory.
    pub const OUT_OF_MEMORY: DriverStatus = 2;
    /// The driver is there, a device is not.
    pub const NO_DEVICE: DriverStatus = 100;
    /// There is no device of this number; HIP's first call says so where there is none at all.
    pub const INVALID_DEVICE: DriverStatus = 101;
    /// The devices reach each other already.
    pub const PEER_ACCESS_ALREADY_ENABLED: DriverStatus = 704;
    /// The operation cannot be captured.
    pub const CAPTURE_UNSUPPORTED: DriverStatus = 900;
}

/// Flags and modes, equal on both sides.
pub mod flag {
    use std::ffi::{c_int, c_uint};

    /// The stream does not wait for the default stream.
    pub const STREAM_NON_BLOCKING: c_uint = 1;
    /// The event carries a time.
    pub const EVENT_TIMED: c_uint = 0;
    /// The event carries no time, which makes it cheaper.
    pub const EVENT_WITHOUT_TIME: c_uint = 2;
    /// A record that is part of a capture, for whoever waits outside.
    pub const EVENT_RECORD_EXTERNAL: c_uint = 1;
    /// Pinned memory that every context may use.
    pub const HOST_PORTABLE: c_uint = 1;
    /// Memory of another device becomes reachable as it is opened.
    pub const IPC_ENABLE_PEER_ACCESS: c_uint = 1;
    /// AMD: device memory that no cache of the device keeps.
    pub const MALLOC_UNCACHED: c_uint = 3;
    /// Other threads may do as they like while this one captures.
    pub const CAPTURE_THREAD_LOCAL: c_int = 1;
    /// Function attribute: bytes of dynamic shared memory it may have.
    pub const FUNCTION_MAX_DYNAMIC_SHARED: c_int = 8;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launch_records_have_the_layout_of_the_header() {
        assert_eq!(size_of::<LaunchAttribute>(), 72);
        assert_eq!(std::mem::offset_of!(LaunchConfig, stream), 32);
        assert_eq!(std::mem::offset_of!(LaunchConfig, attribute_count), 48);
        assert_eq!(size_of::<LaunchConfig>(), 56);
    }
}
