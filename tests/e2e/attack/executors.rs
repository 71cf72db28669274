//! Attacks that kill or stop executor processes.

use super::target::{AttackTarget, REPLY_TIMEOUT};
use crate::http::executor_process::{children_as, is_ready};
use crate::rng::SimRng;
use rustix::process::{Pid, Signal, kill_process};
use std::time::{Duration, Instant};

/// Kills the executors with SIGKILL.
pub(super) fn kill(target: &AttackTarget, _: &mut SimRng) {
    target.with_executor_outage("executors_killed", || replace(target, Signal::KILL));
}

/// Stops the executors with SIGSTOP; the server detects the hang and replaces them.
pub(super) fn stop(target: &AttackTarget, _: &mut SimRng) {
    target.with_executor_outage("executors_stopped", || replace(target, Signal::STOP));
}

/// Sends a signal to all executors and waits until their replacements accept requests.
fn replace(target: &AttackTarget, signal: Signal) {
    let executors = signal_all(target, signal);
    await_replacements(target, signal, &executors);
}

/// Sends a signal to all executors; returns their process ids.
pub(super) fn signal_all(target: &AttackTarget, signal: Signal) -> Vec<u32> {
    let executors = children_as("executor", target.pid);
    for pid in &executors {
        let _ = kill_process(Pid::from_raw(*pid as i32).unwrap(), signal); // The process may have exited.
    }
    executors
}

/// Waits until the replacements of `executors`, which got `signal`, accept requests.
pub(super) fn await_replacements(target: &AttackTarget, signal: Signal, executors: &[u32]) {
    let begun = Instant::now();
    while target.is_alive() {
        let now = children_as("executor", target.pid);
        let is_replaced = now.iter().any(|pid| !executors.contains(pid));
        if is_replaced && is_ready(target.address) {
            return;
        }
        if begun.elapsed() > REPLY_TIMEOUT {
            let states: Vec<_> = now.iter().map(|pid| state_of(*pid)).collect();
            target.add_violation(format!(
                "{signal:?} to executors {executors:?}: after {REPLY_TIMEOUT:?} there are {now:?} in the states {states:?}"
            ));
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// State of a process in `/proc/PID/stat`, such as `T` (stopped).
fn state_of(pid: u32) -> String {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().and_then(|rest| rest.get(..1)).unwrap_or_default().to_owned()
}
