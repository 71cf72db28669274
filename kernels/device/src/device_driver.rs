//! Memory, copies, streams and graphs of one device: the trait that every backend implements.

use crate::timestamps::HostTimestamps;
use crate::{Buffer, CopyInFlight, DeviceError, EventTimestamps, PinnedBuffer};
use std::sync::Arc;

/// Index of a stream: launches on one stream run in submission order. The CPU device runs every launch
/// synchronously, so it has one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceStream(pub usize);

/// Free and total memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemInfo {
    /// Bytes that can still be allocated.
    pub free_bytes: u64,
    /// Total bytes.
    pub total_bytes: u64,
}

/// Captured graph of launches.
#[derive(Debug)]
pub struct CapturedGraph(pub(crate) Box<dyn GraphReplay>);

/// Device-specific executable of a captured graph.
#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "streams are passed as `DeviceDriver` passes them"
)]
pub(crate) trait GraphReplay: Send + std::fmt::Debug {
    /// Replays the graph on `s`.
    fn replay(&self, s: &DeviceStream) -> Result<(), DeviceError>;
}

/// Memory, copies and streams of one device.
pub trait DeviceDriver: Send + Sync {
    /// Returns a description of the device for logs and reports.
    fn name(&self) -> String;

    /// Allocates zeroed memory.
    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError>;

    /// Copies host bytes to `[offset, offset + from.len())` of a buffer.
    fn upload(&self, to: &mut Buffer, offset: usize, from: &[u8]) -> Result<(), DeviceError>;

    /// Copies bytes `[offset, offset + to.len())` of a buffer to the host, after all launches on `s`.
    fn download(
        &self,
        s: &DeviceStream,
        from: &Buffer,
        offset: usize,
        to: &mut [u8],
    ) -> Result<(), DeviceError>;

    /// Blocks until all launches on `s` have completed.
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

    /// Begins graph capture on `s`: launches are captured instead of executed. Memory must not be allocated,
    /// copied synchronously or freed until `end_capture`.
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

    /// Begins a dry run: launches do nothing, but the kernels that they need are collected for compilation.
    fn begin_dry_run(&self) {}

    /// Ends the dry run: compiles all collected kernel modules in parallel (without a dry run, launches would
    /// compile them one by one) and enables launches again. Calls `progress(done, total)` with numbers of
    /// modules repeatedly until all are compiled.
    fn end_dry_run(&self, _progress: &mut dyn FnMut(u64, u64)) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Returns the secondary stream, on which launches overlap those of the first stream; `None` if the
    /// device runs launches serially or records a timestamp per kernel.
    fn secondary_stream(&self) -> Option<DeviceStream> {
        None
    }

    /// Makes later launches on `s` wait for all launches so far on `other`. While one of the two streams is
    /// captured, the other joins the capture; the captured stream must wait for it again before
    /// `end_capture`.
    fn stream_wait(&self, s: &DeviceStream, other: &DeviceStream) -> Result<(), DeviceError> {
        let _ = (s, other);
        Ok(())
    }

    /// Freezes autotuning: from now on steps serve requests, so no launch is timed to choose between
    /// algorithms, which would delay them.
    fn freeze_autotuning(&self) {}

    /// Allocates `count` unrecorded GPU event timestamps. The default implementation reads the host clock and
    /// is correct for devices that run launches synchronously.
    fn alloc_timestamps(&self, count: usize) -> Result<Arc<dyn EventTimestamps>, DeviceError> {
        Ok(Arc::new(HostTimestamps::new(count)))
    }

    /// Begins per-kernel timestamps: after each launch, records the next event of `timestamps`, starting
    /// with event `first`, until none is left. Launches do not overlap their predecessor meanwhile. Devices may
    /// ignore the call.
    fn begin_kernel_timestamps(&self, _timestamps: &Arc<dyn EventTimestamps>, _first: usize) {}

    /// Ends per-kernel timestamps and returns the kernel names of the events recorded since
    /// `begin_kernel_timestamps`, in order.
    fn end_kernel_timestamps(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Returns free and total memory.
    fn mem_info(&self) -> MemInfo;
}
