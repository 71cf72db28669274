//! An executor killed by the kernel's cgroup OOM killer is handled as any other executor failure.

use super::executor_process::{children_as, complete_text, executor, finish, stream};
use super::server_process::ServerProcess;
use crate::http_client::post;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const EXECUTOR_PROCESS_FLAGS: &[&str] =
    &["--executor", "process", "--threads", "1", "--dtype", "float32"];
const MORE_BYTES: u64 = 16 << 20;
const TOKENS: u32 = 60;

/// A memory cgroup, version 1 or 2; removed on drop.
struct MemoryCgroup {
    folder: PathBuf,
    /// File with the kernel's count of OOM kills.
    events: &'static str,
}

impl MemoryCgroup {
    /// Creates a cgroup with a limit on the memory that its processes allocate from then on. Needs root.
    fn limited(bytes: u64) -> Self {
        let first = Path::new("/sys/fs/cgroup/memory");
        let (root, limit, events) = if first.exists() {
            (first, "memory.limit_in_bytes", "memory.oom_control")
        } else {
            (Path::new("/sys/fs/cgroup"), "memory.max", "memory.events")
        };
        let folder = root.join(format!("hadron-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join(limit), bytes.to_string()).unwrap();
        Self { folder, events }
    }

    fn take(&self, pid: u32) {
        fs::write(self.folder.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    fn killed(&self) -> u64 {
        let events = fs::read_to_string(self.folder.join(self.events)).unwrap();
        let of = |line: &str| line.strip_prefix("oom_kill ")?.parse().ok();
        events.lines().find_map(of).unwrap_or_else(|| panic!("{events}"))
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.folder); // A process may remain in it if a test failed.
    }
}

/// The CPU's KV pool is allocated on first use. A cgroup that is too small for the pool is therefore exceeded
/// during requests, not at start-up.
#[test]
#[ignore = "creates a control group, which needs root: `just memory-limit`"]
fn cgroup_oom_kill_restarts_executor_without_token_loss() {
    let mut process = ServerProcess::start(EXECUTOR_PROCESS_FLAGS);
    let (at, former) = (process.address, executor(&process));
    let expected = complete_text(at, TOKENS);
    let group = MemoryCgroup::limited(MORE_BYTES);
    group.take(former);
    let (over, asked) = (AtomicBool::new(false), AtomicU64::new(0));
    let (started, mut ends) = (Instant::now(), Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let number = asked.fetch_add(1, Ordering::Relaxed);
                    let prompt = format!("{number} {}", "fox ".repeat(400));
                    let body = json!({"prompt": prompt, "max_tokens": 1});
                    assert_eq!(post(at, "/v1/completions", &body).status, 200);
                }
            });
        }
        let replaced = || {
            let now = children_as("executor", process.id());
            !now.is_empty() && !now.contains(&former)
        };
        while !replaced() && started.elapsed() < Duration::from_mins(5) {
            ends.push(finish(stream(at, TOKENS)));
        }
        over.store(true, Ordering::Relaxed);
    });
    let (asked, streams) = (asked.into_inner(), ends.len());
    println!("{asked} requests and {streams} streams in {:?}", started.elapsed());
    assert_eq!(group.killed(), 1);
    assert!(ends.into_iter().all(|(text, end)| text == expected && end == "length"));
    assert_eq!(complete_text(at, TOKENS), expected);
    process.signal("TERM");
    assert_eq!(process.exits_within(Duration::from_secs(20)).code(), Some(0));
}
