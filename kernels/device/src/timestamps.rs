//! Points in time between the launches of a stream, on the device's own clock.

use crate::{DeviceError, DeviceStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Marks of one device, all reserved at once; each is set again and again.
pub trait EventTimestamps: Send + Sync + std::fmt::Debug {
    /// Number of marks.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Mark `i` is the end of everything launched on `s` so far. In a capture it becomes part of the
    /// recording: every replay sets it.
    fn record(&self, s: &DeviceStream, i: usize) -> Result<(), DeviceError>;

    /// Waits until the launches before mark `i`, which has been set, are over.
    fn wait(&self, i: usize) -> Result<(), DeviceError>;

    /// Nanoseconds from mark `from` to mark `to`, both of which are over.
    fn elapsed_ns(&self, from: usize, to: usize) -> Result<i64, DeviceError>;
}

/// Marks of a device whose launches are over when they return: times of the host.
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
        let (kernel, what, index, limit) = ("mark", "mark", i as i64, self.at_ns.len());
        self.at_ns.get(i).ok_or(DeviceError::Index { kernel, what, index, limit })
    }
}

impl EventTimestamps for HostTimestamps {
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
        let (marks, s) = (HostTimestamps::new(3), DeviceStream::default());
        for i in [2, 0] {
            marks.record(&s, i).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        marks.wait(0).unwrap();
        assert!(marks.elapsed_ns(2, 0).unwrap() >= 1_000_000);
        assert!(marks.elapsed_ns(0, 2).unwrap() <= -1_000_000);
        assert!(marks.record(&s, 3).is_err(), "the fourth of three");
    }
}
