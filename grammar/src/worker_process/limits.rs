//! Limits that a worker process sets for itself before it works on a request.

use rustix::process::{Resource, Rlimit, setrlimit};
use std::{fs, io};

/// The out-of-memory killer takes a worker process first.
const OOM_SCORE: &str = "1000";

/// Environment variable and value of a worker process: its allocator maps memory as it needs it. By default it maps a gigabyte at start,
/// which `limit_memory` would not count.
pub const ARENA_RESERVE: (&str, &str) = ("MIMALLOC_ARENA_RESERVE", "16MiB");

/// What threads that may have much to do leave to others, in steps of the system's scale.
const NICENESS: i32 = 10;

/// Gives this thread, and those that it starts, a lower priority.
pub fn yield_to_others() {
    if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
        tracing::debug!(%error, "work of requests gets as much of the processor as everything else");
    }
}

/// Bounds the address space of this process to `bytes` more than it has now. It leaves no core dump, and goes first where memory runs out.
///
/// Errors: the system refuses the limit, or `/proc` cannot be read.
pub fn limit_memory(bytes: u64) -> io::Result<()> {
    let limit = |bytes: u64| Rlimit { current: Some(bytes), maximum: Some(bytes) };
    setrlimit(Resource::As, limit(address_space()? + bytes))?;
    setrlimit(Resource::Core, limit(0))?;
    if let Err(error) = fs::write("/proc/self/oom_score_adj", OOM_SCORE) {
        tracing::debug!(%error, "other processes may be killed first where memory runs out");
    }
    Ok(())
}

/// Bytes of address space that this process has now.
fn address_space() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let kib = size.and_then(|size| size.trim().trim_end_matches(" kB").parse::<u64>().ok());
    let missing = || io::Error::other("/proc/self/status does not tell VmSize");
    kib.map(|kib| kib << 10).ok_or_else(missing)
}
