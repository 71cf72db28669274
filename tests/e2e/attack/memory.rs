//! Resident memory of the server over a run, and descriptors that are open after it.

use crate::soak::{ResourceSample, sample, slope};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Samples of a run.
const SAMPLES: u32 = 1_000;
/// Samples of which the least counts: bodies that are being read come and go, what leaks stays.
const WINDOW: usize = 50;
/// Growth of the floor after a warm-up of a quarter of the run, in KiB an hour. A leak of 1 KiB a request is more.
const SLOPE_KIB_MAX: f64 = 256.0 * 1024.0;
/// Growth at any time, in KiB: what `docs/operations.md` bounds, with the limits that the server of an attack has, and compiled grammars.
const GROWTH_KIB_MAX: u64 = 1_280 << 10;
/// Descriptors that may be open after a run beyond those of its start: executors and pools of threads come and go.
const DESCRIPTORS_MORE: u64 = 16;
/// Runs shorter than this have no slope that means anything.
const SLOPE_TIME_MIN: Duration = Duration::from_mins(20);

/// Looks at the memory of a server.
pub(super) struct MemoryWatch {
    pid: u32,
    time: Duration,
    began: Instant,
    samples: Mutex<Vec<ResourceSample>>,
}

impl MemoryWatch {
    pub(super) fn new(pid: u32, time: Duration) -> Self {
        Self { pid, time, began: Instant::now(), samples: Mutex::default() }
    }

    /// Time between two samples.
    pub(super) fn pause(&self) -> Duration {
        (self.time / SAMPLES).clamp(Duration::from_millis(50), Duration::from_secs(10))
    }

    pub(super) fn sample(&self) {
        let now = sample(&[self.pid], self.began.elapsed(), &Mutex::default());
        // A server that has ended has no memory; that is noticed elsewhere.
        if now.resident_kib > 0 {
            self.samples.lock().unwrap().push(now);
        }
    }

    /// Whether descriptors of connections are closed now.
    pub(super) fn has_closed(&self) -> bool {
        self.open_descriptors().is_none()
    }

    /// Descriptors that are open beyond those of the start, in words.
    pub(super) fn open_descriptors(&self) -> Option<String> {
        let first = self.samples.lock().unwrap().first()?.descriptors;
        let now = sample(&[self.pid], self.began.elapsed(), &Mutex::default()).descriptors;
        (now > first + DESCRIPTORS_MORE).then(|| format!("{now} descriptors are open, not {first}"))
    }

    /// Growth beyond the bounds, in words.
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
        let slope = slope(&floor, |sample| sample.resident_kib as f64);
        println!("memory: {slope:+.0} KiB an hour");
        (slope > SLOPE_KIB_MAX).then(|| format!("memory grows by {slope:.0} KiB an hour"))
    }
}
