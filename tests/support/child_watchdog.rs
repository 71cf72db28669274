//! Timeouts for child processes: a wait for a child process always ends, and its result shows whether the
//! timeout was reached.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Timeout for a child process to become ready, or to exit when it is expected to exit. It is minutes long
/// for machines under load.
pub(crate) const CHILD_TIMEOUT: Duration = Duration::from_mins(4);

/// Kills a child process after a timeout, so that a wait for its output or exit ends.
pub(crate) struct ChildWatchdog {
    stop_sender: Sender<()>,
    thread: JoinHandle<bool>,
}

impl ChildWatchdog {
    pub(crate) fn start(pid: u32, limit: Duration) -> Self {
        let (stop_sender, stop_receiver) = channel();
        let thread = std::thread::spawn(move || {
            let timed_out = stop_receiver.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
            if timed_out {
                // An error of `kill` is ignored, because the process may already have exited.
                let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
            }
            timed_out
        });
        Self { stop_sender, thread }
    }

    /// Stops the watchdog; returns whether the watchdog has killed the process.
    pub(crate) fn stop(self) -> bool {
        drop(self.stop_sender);
        self.thread.join().unwrap()
    }
}

/// Runs a command until it exits, and returns its output.
pub(crate) fn run_to_end(command: &mut Command) -> Output {
    run_within(command, CHILD_TIMEOUT)
}

/// Runs a command until it exits, which must be within `limit`, and returns its output.
pub(crate) fn run_within(command: &mut Command, limit: Duration) -> Output {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let watchdog = ChildWatchdog::start(child.id(), limit);
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!watchdog.stop(), "it did not end within {limit:?}: {command:?}: {text}");
    output
}

#[test]
fn hung_child_is_killed_and_named() {
    let mut sleeps = Command::new("sleep");
    sleeps.arg("600");
    let run = || run_within(&mut sleeps, Duration::from_millis(50));
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_err();
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.contains("did not end within 50ms") && text.contains("sleep"), "{text}");
    assert!(run_within(&mut Command::new("true"), CHILD_TIMEOUT).status.success());
}
