//! Timestamps of events between the launches on a stream, measured with the clock of the device.

use crate::{DeviceError, DeviceStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Fixed number of timestamp events of one device. Each event can be recorded repeatedly.
pub trait TimestampEvents: Send + Sync + std::fmt::Debug {
    /// Number of timestamp events.
    fn len(&self) -> usize;

    /// Whether there are no timestamp events.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Records event `i` on `s`, after all work that was previously submitted to `s`. During graph capture,
    /// the record becomes a graph node, which is executed in every replay.
    fn record(&self, s: &DeviceStream, i: usize) -> Result<(), DeviceError>;

    /// Blocks until event `i` has completed. The event must have been recorded.
    fn wait(&self, i: usize) -> Result<(), DeviceError>;

    /// Returns the time from event `from` to event `to` in nanoseconds. Both events must have completed.
    fn elapsed_ns(&self, from: usize, to: usize) -> Result<i64, DeviceError>;
}

/// Timestamp events of a device that runs launches synchronously; they record the time of the host clock.
#[derive(Debug)]
pub(crate) struct HostTimestamps {
    start: Instant,
    at_ns: Vec<AtomicU64>,
}

impl HostTimestamps {
    pub(crate) fn new(count: usize) -> Self {
        Self { start: Instant::now(), at_ns: (0..count).map(|_| AtomicU64::new(0)).collect() }
    }

    fn at(&self, i: usize) -> Result<&AtomicU64, DeviceError> {
        let (kernel, what, index, limit) =
            ("event timestamp", "event timestamp", i as i64, self.at_ns.len());
        self.at_ns.get(i).ok_or(DeviceError::Index { kernel, what, index, limit })
    }
}

impl TimestampEvents for HostTimestamps {
    fn len(&self) -> usize {
        self.at_ns.len()
    }

    fn record(&self, _: &DeviceStream, i: usize) -> Result<(), DeviceError> {
        let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.at(i)?.store(now, Ordering::Release);
        Ok(())
    }

    fn wait(&self, i: usize) -> Result<(), DeviceError> {
        self.at(i).map(drop)
    }

    fn elapsed_ns(&self, from: usize, to: usize) -> Result<i64, DeviceError> {
        let at = |i| Ok::<_, DeviceError>(self.at(i)?.load(Ordering::Acquire) as i64);
        Ok(at(to)? - at(from)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_timestamps_are_ordered() {
        let (timestamps, s) = (HostTimestamps::new(3), DeviceStream::default());
        for i in [2, 0] {
            timestamps.record(&s, i).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        timestamps.wait(0).unwrap();
        assert!(timestamps.elapsed_ns(2, 0).unwrap() >= 1_000_000);
        assert!(timestamps.elapsed_ns(0, 2).unwrap() <= -1_000_000);
        assert!(timestamps.record(&s, 3).is_err(), "index 3 of 3 timestamps");
    }
}
