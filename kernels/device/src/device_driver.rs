//! Trait that every device implements: memory, copies, streams, graphs and timestamps.

use crate::timestamps::HostTimestamps;
use crate::{Buffer, CopyInFlight, DeviceError, PinnedBuffer, TimestampEvents};
use std::sync::Arc;

/// Index of a stream. Launches on the same stream run in submission order. The CPU device runs every launch
/// synchronously and has only one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceStream(pub usize);

/// Free and total memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemInfo {
    /// Number of bytes that can still be allocated.
    pub free_bytes: u64,
    /// Total number of bytes of the device.
    pub total_bytes: u64,
}

/// Numbers of driver calls since a device was opened that a serving step must not make.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DriverCallCounts {
    /// Number of allocations of device memory and of pinned host memory.
    pub allocations: u64,
    /// Number of times that the host waited for the device.
    pub synchronizations: u64,
}

/// Captured graph of launches (CUDA graph or HIP graph) that can be replayed.
#[derive(Debug)]
pub struct CapturedGraph(pub(crate) Box<dyn ReplayableGraph>);

/// Instantiated graph of launches; each device type that supports graph capture implements the replay.
#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "streams are passed as `DeviceDriver` passes them"
)]
pub(crate) trait ReplayableGraph: Send + std::fmt::Debug {
    /// Replays the graph on stream `s`: executes all launches that were captured.
    fn replay(&self, s: &DeviceStream) -> Result<(), DeviceError>;
}

/// Driver of one device: allocates and copies memory, and controls streams, graphs and timestamps.
pub trait DeviceDriver: Send + Sync {
    /// Returns a description of the device for logs and reports.
    fn name(&self) -> String;

    /// Allocates zeroed device memory.
    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError>;

    /// Copies host bytes to `[offset, offset + from.len())` of a buffer, and returns after the copy has
    /// completed.
    fn upload(&self, to: &mut Buffer, offset: usize, from: &[u8]) -> Result<(), DeviceError>;

    /// Copies the bytes `[offset, offset + to.len())` of a buffer to the host, after all launches on `s` have
    /// completed.
    fn download(
        &self,
        s: &DeviceStream,
        from: &Buffer,
        offset: usize,
        to: &mut [u8],
    ) -> Result<(), DeviceError>;

    /// Blocks the host until all launches on `s` have completed.
    fn synchronize(&self, s: &DeviceStream) -> Result<(), DeviceError>;

    /// Allocates zeroed pinned host memory for asynchronous copies.
    fn alloc_pinned(&self, bytes: usize) -> Result<PinnedBuffer, DeviceError>;

    /// Starts an asynchronous copy on `s` of the first `bytes` bytes of `from` to the beginning of a buffer.
    fn start_upload(
        &self,
        s: &DeviceStream,
        to: &mut Buffer,
        from: PinnedBuffer,
        bytes: usize,
    ) -> Result<CopyInFlight, DeviceError>;

    /// Starts an asynchronous copy on `s` of the first `bytes` bytes of a buffer to the beginning of `to`.
    fn start_download(
        &self,
        s: &DeviceStream,
        from: &Buffer,
        to: PinnedBuffer,
        bytes: usize,
    ) -> Result<CopyInFlight, DeviceError>;

    /// Fills a whole buffer with zeros, asynchronously on `s`.
    fn zero(&self, s: &DeviceStream, x: &mut Buffer) -> Result<(), DeviceError>;

    /// Whether the device supports graph capture and replay.
    fn captures_graphs(&self) -> bool {
        false
    }

    /// Begins graph capture on `s`: launches are captured instead of executed. Until `end_capture`, memory
    /// must not be allocated, copied synchronously or freed.
    fn begin_capture(&self, _: &DeviceStream) -> Result<(), DeviceError> {
        Err(DeviceError::GraphsUnsupported { device: self.name() })
    }

    /// Ends graph capture and returns the instantiated graph of all launches since `begin_capture`.
    fn end_capture(&self, _: &DeviceStream) -> Result<CapturedGraph, DeviceError> {
        Err(DeviceError::GraphsUnsupported { device: self.name() })
    }

    /// Replays a captured graph on `s`. All memory that the graph reads and writes must still be allocated.
    fn replay(&self, s: &DeviceStream, graph: &CapturedGraph) -> Result<(), DeviceError> {
        graph.0.replay(s)
    }

    /// Begins a dry run: launches do not execute anything, but their kernels are recorded, so that
    /// `end_dry_run` can compile all of them in parallel.
    fn begin_dry_run(&self) {}

    /// Ends the dry run: compiles all recorded kernel modules in parallel, and enables launches again.
    /// Without a dry run, each launch compiles its module if needed. Calls `progress` repeatedly with the
    /// number of compiled modules and the total number, until all modules are compiled.
    fn end_dry_run(&self, _progress: &mut dyn FnMut(u64, u64)) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Returns the secondary stream, whose launches may overlap launches of the first stream; `None` if the
    /// device runs launches serially, or while per-kernel timestamps are recorded.
    fn secondary_stream(&self) -> Option<DeviceStream> {
        None
    }

    /// Makes later launches on `s` wait for all previous launches on `other`. If one of the streams is being
    /// captured, the other stream joins the capture; the captured stream must wait for the joined stream
    /// before `end_capture`.
    fn stream_wait(&self, s: &DeviceStream, other: &DeviceStream) -> Result<(), DeviceError> {
        let _ = (s, other);
        Ok(())
    }

    /// Disables autotuning before requests are served: later launches are not timed to choose between
    /// algorithms, because timing would delay requests.
    fn freeze_autotuning(&self) {}

    /// Allocates `count` GPU event timestamps, which are initially not recorded. The default implementation
    /// reads the host clock, which is correct for devices that run launches synchronously.
    fn alloc_timestamps(&self, count: usize) -> Result<Arc<dyn TimestampEvents>, DeviceError> {
        Ok(Arc::new(HostTimestamps::new(count)))
    }

    /// Begins per-kernel timestamps: after each launch, the next event of `timestamps` is recorded, starting
    /// with the event `first`, until all events are used. While per-kernel timestamps are recorded, launches
    /// do not overlap each other. Devices may ignore the call.
    fn begin_kernel_timestamps(&self, _timestamps: &Arc<dyn TimestampEvents>, _first: usize) {}

    /// Ends per-kernel timestamps. Returns the kernel name of each event that was recorded since
    /// `begin_kernel_timestamps`, in order.
    fn end_kernel_timestamps(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Returns the number of kernel modules that are loaded; 0 on the CPU.
    fn loaded_modules(&self) -> usize {
        0
    }

    /// Returns how often memory was allocated and the host waited for the device since the device was opened. On the CPU,
    /// launches complete before they return, so the host never waits.
    fn driver_call_counts(&self) -> DriverCallCounts;

    /// Returns free and total memory of the device.
    fn mem_info(&self) -> MemInfo;
}
