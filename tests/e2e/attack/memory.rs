//! Checks the server's resident memory during a run of attacks, and its open file descriptors afterwards.

use crate::soak::{ResourceSample, sample, slope};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Number of memory samples of a run.
const SAMPLES: u32 = 1_000;
/// Number of memory samples in a window. Only the minimum of each window is evaluated: the memory of request
/// bodies in transfer is freed again, leaked memory is not.
const WINDOW: usize = 50;
/// Maximum growth rate of the window minima in KiB per hour, measured after a warm-up of a quarter of the
/// run. A leak of 1 KiB per request exceeds it.
const SLOPE_KIB_MAX: f64 = 256.0 * 1024.0;
/// Maximum growth of resident memory at any time of a run, in KiB: the memory bound that `docs/operations.md`
/// states for the limits of the attacked server, plus compiled grammars.
const GROWTH_KIB_MAX: u64 = 1_280 << 10;
/// Maximum increase in open file descriptors over a run. It is above 0, because the number of executors and
/// pool threads varies.
const DESCRIPTORS_MORE: u64 = 16;
/// Minimum duration of a run for which the growth per hour is meaningful.
pub(super) const SLOPE_TIME_MIN: Duration = Duration::from_mins(20);

/// Samples the resident memory of a server, and checks the samples at the end.
pub(super) struct MemorySampler {
    pid: u32,
    time: Duration,
    began: Instant,
    samples: Mutex<Vec<ResourceSample>>,
}

impl MemorySampler {
    pub(super) fn new(pid: u32, time: Duration) -> Self {
        Self { pid, time, began: Instant::now(), samples: Mutex::default() }
    }

    /// Interval between two memory samples.
    pub(super) fn pause(&self) -> Duration {
        (self.time / SAMPLES).clamp(Duration::from_millis(50), Duration::from_secs(10))
    }

    pub(super) fn sample(&self) {
        let now = sample(&[self.pid], self.began.elapsed(), &Mutex::default());
        // A server that has exited has no resident memory; another check detects the exit.
        if now.resident_kib > 0 {
            self.samples.lock().unwrap().push(now);
        }
    }

    /// Whether the server has closed the descriptors of disconnected clients, judged by the number of open
    /// descriptors.
    pub(super) fn has_closed(&self) -> bool {
        self.open_descriptors().is_none()
    }

    /// Returns a description of the server's open file descriptors if there are more of them than at the
    /// start plus `DESCRIPTORS_MORE`.
    pub(super) fn open_descriptors(&self) -> Option<String> {
        let first = self.samples.lock().unwrap().first()?.descriptors;
        let now = sample(&[self.pid], self.began.elapsed(), &Mutex::default()).descriptors;
        (now > first + DESCRIPTORS_MORE).then(|| format!("{now} descriptors are open, not {first}"))
    }

    /// Returns a description of the memory growth if it exceeds the bounds.
    pub(super) fn growth_violations(&self) -> Option<String> {
        let samples = self.samples.lock().unwrap();
        let (first, last) = (samples.first()?, samples.last()?);
        let most = samples.iter().map(|sample| sample.resident_kib).max()?;
        let grown = most.saturating_sub(first.resident_kib);
        let [first_kib, last_kib] = [first, last].map(|sample| sample.resident_kib);
        println!("memory: {first_kib} KiB at the start, {most} at most, {last_kib} at the end");
        println!("descriptors: {}, {} at the end", first.descriptors, last.descriptors);
        if grown > GROWTH_KIB_MAX {
            return Some(format!("memory grew by {grown} KiB"));
        }
        if self.time < SLOPE_TIME_MIN {
            return None;
        }
        let least = |window: &[ResourceSample]| {
            window.iter().min_by_key(|sample| sample.resident_kib).copied()
        };
        let floor: Vec<ResourceSample> = samples.chunks(WINDOW).filter_map(least).collect();
        let floor_mib: Vec<u64> = floor.iter().map(|sample| sample.resident_kib >> 10).collect();
        println!("memory: minima of the windows in MiB: {floor_mib:?}");
        let slope = slope(&floor, |sample| sample.resident_kib as f64);
        println!("memory: {slope:+.0} KiB an hour");
        (slope > SLOPE_KIB_MAX).then(|| format!("memory grows by {slope:.0} KiB an hour"))
    }
}
