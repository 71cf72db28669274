//! Limits that a worker process sets for itself before it processes requests.

use rustix::process::{Resource, Rlimit, setrlimit};
use std::{fs, io};

/// Value of `oom_score_adj` for worker processes, which makes the out-of-memory killer choose them first.
const OOM_SCORE: &str = "1000";

/// Environment variable and value that make the allocator of a worker process map memory on demand. By
/// default the allocator maps 1 GiB at start, which `limit_memory` would not count.
pub const ARENA_RESERVE: (&str, &str) = ("MIMALLOC_ARENA_RESERVE", "16MiB");

/// Nice value of low-priority threads.
const NICENESS: i32 = 10;

/// Lowers the priority of the calling thread and of threads that it starts later.
pub fn lower_priority() {
    if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
        tracing::debug!(%error, "cannot lower the thread priority");
    }
}

/// Limits the address space of this process to its current size plus `bytes`, disables core dumps, and makes
/// the out-of-memory killer choose this process first.
///
/// Errors: the system rejects the limit, or `/proc` cannot be read.
pub fn limit_memory(bytes: u64) -> io::Result<()> {
    let limit = |bytes: u64| Rlimit { current: Some(bytes), maximum: Some(bytes) };
    setrlimit(Resource::As, limit(address_space()? + bytes))?;
    setrlimit(Resource::Core, limit(0))?;
    if let Err(error) = fs::write("/proc/self/oom_score_adj", OOM_SCORE) {
        tracing::debug!(%error, "cannot raise the OOM score of this process");
    }
    Ok(())
}

/// Returns the size of this process's address space in bytes.
fn address_space() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let kib = size.and_then(|size| size.trim().trim_end_matches(" kB").parse::<u64>().ok());
    let missing = || io::Error::other("/proc/self/status has no VmSize");
    kib.map(|kib| kib << 10).ok_or_else(missing)
}
