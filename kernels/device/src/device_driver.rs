//! Memory, copies, streams and graphs of one device: what every backend implements.

use crate::timestamps::HostTimestamps;
use crate::{Buffer, CopyInFlight, DeviceError, EventTimestamps, PinnedBuffer};
use std::sync::Arc;

/// An order of launches. The CPU device runs every launch to its end before it returns, so it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceStream(pub usize);

/// Memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemInfo {
    /// Bytes that can still be allocated.
    pub free_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
}

/// A recording of launches.
#[derive(Debug)]
pub struct CapturedGraph(pub Box<dyn GraphReplay>);

/// What a device keeps of a recording.
pub trait GraphReplay: Send + std::fmt::Debug {
    /// Runs it on `s`.
    fn replay(&self, s: &DeviceStream) -> Result<(), DeviceError>;
}

/// Memory, copies and order of one device.
pub trait DeviceDriver: Send + Sync {
    /// The device in words, for logs and reports.
    fn name(&self) -> String;

    /// Allocates zeroed memory.
    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError>;

    /// Copies host bytes to `[offset, offset + from.len())` of a buffer.
    fn upload(&self, to: &mut Buffer, offset: usize, from: &[u8]) -> Result<(), DeviceError>;

    /// Copies `[offset, offset + to.len())` of a buffer to the host, after all launches on `s`.
    fn download(
        &self,
        s: &DeviceStream,
        from: &Buffer,
        offset: usize,
        to: &mut [u8],
    ) -> Result<(), DeviceError>;

    /// Waits for all launches on `s`.
    fn synchronize(&self, s: &DeviceStream) -> Result<(), DeviceError>;

    /// Allocates zeroed host memory for copies that run by themselves.
    fn alloc_pinned(&self, bytes: usize) -> Result<PinnedBuffer, DeviceError>;

    /// Starts a copy of the first `bytes` of `from` to the beginning of a buffer, in the order of `s`.
    fn start_upload(
        &self,
        s: &DeviceStream,
        to: &mut Buffer,
        from: PinnedBuffer,
        bytes: usize,
    ) -> Result<CopyInFlight, DeviceError>;

    /// Starts a copy of the first `bytes` of a buffer to the beginning of `to`, in the order of `s`.
    fn start_download(
        &self,
        s: &DeviceStream,
        from: &Buffer,
        to: PinnedBuffer,
        bytes: usize,
    ) -> Result<CopyInFlight, DeviceError>;

    /// Fills all of a buffer with zeros, in the order of `s`.
    fn zero(&self, s: &DeviceStream, x: &mut Buffer) -> Result<(), DeviceError>;

    /// Whether launches can be captured once and replayed.
    fn captures_graphs(&self) -> bool {
        false
    }

    /// From now on launches on `s` are recorded instead of run. No memory may be allocated, copied
    /// synchronously or freed until `end_capture`.
    fn begin_capture(&self, _: &DeviceStream) -> Result<(), DeviceError> {
        Err(DeviceError::GraphsUnsupported { device: self.name() })
    }

    /// What has been recorded since `begin_capture`, ready to be replayed.
    fn end_capture(&self, _: &DeviceStream) -> Result<CapturedGraph, DeviceError> {
        Err(DeviceError::GraphsUnsupported { device: self.name() })
    }

    /// Runs a recording on `s`. Everything it reads and writes must still be allocated.
    fn replay(&self, s: &DeviceStream, graph: &CapturedGraph) -> Result<(), DeviceError> {
        graph.0.replay(s)
    }

    /// From now on launches do nothing, but what they would need is noted.
    fn begin_dry_run(&self) {}

    /// Launches run again, and all that the rehearsed ones need is ready: compiled side by side, where the
    /// launches would have had it compiled one by one. `progress` hears how many modules of how many are
    /// done, again and again for as long as it takes.
    fn end_dry_run(&self, _progress: &mut dyn FnMut(u64, u64)) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Where launches run beside those of the first stream, if anywhere: a device that runs one after the other, or marks each
    /// of them, has no such place.
    fn secondary_stream(&self) -> Option<DeviceStream> {
        None
    }

    /// Launches on `s` from now on come behind all that were made on `other`. In a capture of one of them the other becomes part
    /// of the recording, and must be followed by it before the end.
    fn stream_wait(&self, s: &DeviceStream, other: &DeviceStream) -> Result<(), DeviceError> {
        let _ = (s, other);
        Ok(())
    }

    /// Steps serve requests from now on: nothing is measured any more to choose between ways of computing,
    /// which would hold them up.
    fn freeze_autotuning(&self) {}

    /// `count` marks that have not been set. What is made here suits a device that runs every launch to
    /// its end before it returns.
    fn alloc_timestamps(&self, count: usize) -> Result<Arc<dyn EventTimestamps>, DeviceError> {
        Ok(Arc::new(HostTimestamps::new(count)))
    }

    /// From now on each launch is followed by one of `marks`, from `first` on, for as long as there are
    /// any, and begins only when its predecessor has ended. A device may mark nothing by itself.
    fn begin_kernel_timestamps(&self, _marks: &Arc<dyn EventTimestamps>, _first: usize) {}

    /// What the marks set since `begin_kernel_timestamps` are behind, in their order: names of kernels.
    fn end_kernel_timestamps(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Free and total memory.
    fn mem_info(&self) -> MemInfo;
}
