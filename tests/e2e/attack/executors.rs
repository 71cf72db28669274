//! Executors that die or stand still.

use super::target::{PATIENCE, Target};
use crate::chance::Chance;
use crate::http::executor_process::{children_as, is_ready, within};
use rustix::process::{Pid, Signal, kill_process};

/// Kills the executor.
pub(super) fn kill(target: &Target, _: &mut Chance) {
    target.lose_executors(|| replace(target, Signal::KILL));
}

/// Stops the executor, which the server takes for hung and replaces.
pub(super) fn stop(target: &Target, _: &mut Chance) {
    target.lose_executors(|| replace(target, Signal::STOP));
}

/// Signals all executors and waits until others serve.
fn replace(target: &Target, signal: Signal) {
    let executors = children_as("executor", target.pid);
    for pid in &executors {
        let _ = kill_process(Pid::from_raw(*pid as i32).unwrap(), signal); // It may be gone.
    }
    within(PATIENCE, "another executor", || {
        let now = children_as("executor", target.pid);
        !target.is_alive()
            || now.iter().any(|pid| !executors.contains(pid)) && is_ready(target.address)
    });
}
