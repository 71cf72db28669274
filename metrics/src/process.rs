//! Process metrics of the Prometheus client libraries, read from the operating system at each scrape.
//!
//! A scrape reads one file and one directory entry and makes two system calls. The collector of the
//! Prometheus library would open a dozen files and count CPU time in whole seconds.

use super::metric_registrar::MetricRegistrar;
use prometheus::{Counter, Error, Gauge};
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

/// Metrics of the server process: CPU time, memory, threads, file descriptors, start time.
pub(super) struct ProcessMetrics {
    cpu: Counter,
    open_fds: Gauge,
    max_fds: Gauge,
    virtual_bytes: Gauge,
    resident_bytes: Gauge,
    threads: Gauge,
    page_bytes: f64,
}

/// Fields of `/proc/self/stat`, as `proc(5)` names them.
struct ProcStat {
    num_threads: f64,
    /// Start time in clock ticks after boot.
    starttime: f64,
    /// Virtual memory size in bytes.
    vsize: f64,
    /// Resident set size in pages.
    rss: f64,
}

impl ProcessMetrics {
    #[rustfmt::skip] // One metric per line.
    pub(super) fn new(f: &MetricRegistrar<'_>) -> Result<Self, Error> {
        let started = f.process_gauge("process_start_time_seconds", "Start time of the process since unix epoch in seconds.")?;
        if let Some(stat) = stat() {
            started.set(start_time(&stat));
        }
        Ok(Self {
            cpu: f.process_seconds("process_cpu_seconds_total", "Total user and system CPU time spent in seconds.")?,
            open_fds: f.process_gauge("process_open_fds", "Number of open file descriptors.")?,
            max_fds: f.process_gauge("process_max_fds", "Maximum number of open file descriptors.")?,
            virtual_bytes: f.process_gauge("process_virtual_memory_bytes", "Virtual memory size in bytes.")?,
            resident_bytes: f.process_gauge("process_resident_memory_bytes", "Resident memory size in bytes.")?,
            threads: f.process_gauge("process_threads", "Number of OS threads in the process.")?,
            page_bytes: rustix::param::page_size() as f64,
        })
    }

    /// Reads all values from the operating system; a value that the operating system does not provide is left
    /// unchanged.
    pub(super) fn update(&self) {
        let cpu_seconds = seconds(clock_gettime(ClockId::ProcessCPUTime));
        self.cpu.inc_by((cpu_seconds - self.cpu.get()).max(0.0));
        if let Some(open) = open_fds() {
            self.open_fds.set(open as f64);
        }
        if let Some(limit) = getrlimit(Resource::Nofile).current {
            self.max_fds.set(limit as f64);
        }
        if let Some(stat) = stat() {
            self.virtual_bytes.set(stat.vsize);
            self.resident_bytes.set(stat.rss * self.page_bytes);
            self.threads.set(stat.num_threads);
        }
    }
}

fn seconds(time: Timespec) -> f64 {
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn stat() -> Option<ProcStat> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The second field, a name in parentheses, may contain spaces and parentheses; the third field follows
    // the last ") ".
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
    Some(ProcStat {
        num_threads: field(20)?,
        starttime: field(22)?,
        vsize: field(23)?,
        rss: field(24)?,
    })
}

/// Start time of the process, in seconds of Unix time.
fn start_time(stat: &ProcStat) -> f64 {
    let ticks_per_s = rustix::param::clock_ticks_per_second() as f64;
    let uptime_s = seconds(clock_gettime(ClockId::Boottime)) - stat.starttime / ticks_per_s;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_secs_f64() - uptime_s
}

/// Returns the number of open file descriptors: the size of `/proc/self/fd` since Linux 6.2; before that the
/// size is 0, and the entries are counted.
fn open_fds() -> Option<u64> {
    let folder = "/proc/self/fd";
    let size = fs::metadata(folder).ok()?.len();
    if size > 0 {
        return Some(size);
    }
    let counted = fs::read_dir(folder).ok()?.count() as u64;
    Some(counted.saturating_sub(1)) // Exclude the descriptor of the directory itself.
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_metrics_are_all_available() {
        let stat = stat().unwrap();
        assert!(stat.num_threads >= 1.0 && stat.vsize > stat.rss, "{} threads", stat.num_threads);
        assert!(stat.rss * rustix::param::page_size() as f64 > 1e6, "{} pages", stat.rss);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        let started = start_time(&stat);
        assert!((now - 3_600.0..=now + 1.0).contains(&started), "started {} s ago", now - started);
        let before = open_fds().unwrap();
        let files: Vec<_> = (0..50).map(|_| fs::File::open("/proc/self/stat").unwrap()).collect();
        // Other threads may close some descriptors meanwhile.
        assert!(open_fds().unwrap() >= before + 25, "{before} before 50 more");
        drop(files);
    }
}
