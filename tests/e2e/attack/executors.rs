//! Attacks that kill or stop executor processes.

use super::target::{AttackTarget, REPLY_TIMEOUT};
use crate::http::executor_process::{children_as, is_ready, wait_until};
use crate::rng::SimRng;
use rustix::process::{Pid, Signal, kill_process};

/// Kills the executors with SIGKILL.
pub(super) fn kill(target: &AttackTarget, _: &mut SimRng) {
    target.with_executor_outage(|| replace(target, Signal::KILL));
}

/// Stops the executors with SIGSTOP; the server detects the hang and replaces them.
pub(super) fn stop(target: &AttackTarget, _: &mut SimRng) {
    target.with_executor_outage(|| replace(target, Signal::STOP));
}

/// Sends a signal to all executors and waits until their replacements accept requests.
fn replace(target: &AttackTarget, signal: Signal) {
    let executors = children_as("executor", target.pid);
    for pid in &executors {
        let _ = kill_process(Pid::from_raw(*pid as i32).unwrap(), signal); // The process may have exited.
    }
    wait_until(REPLY_TIMEOUT, "another executor", || {
        let now = children_as("executor", target.pid);
        !target.is_alive()
            || now.iter().any(|pid| !executors.contains(pid)) && is_ready(target.address)
    });
}
