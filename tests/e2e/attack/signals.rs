//! Signals that are no reason to end.

use super::target::AttackTarget;
use crate::http::executor_process::wait_until;
use crate::rng::SimRng;
use rustix::process::{Pid, Signal, kill_process};
use std::time::Duration;

/// What a terminal that closes, a log rotation and a window that is resized send.
pub(super) fn harmless(target: &AttackTarget, chance: &mut SimRng) {
    let signal = chance.pick(&[
        Signal::HUP,
        Signal::USR1,
        Signal::USR2,
        Signal::WINCH,
        Signal::PIPE,
        Signal::CONT,
    ]);
    let Some(pid) = Pid::from_raw(target.pid as i32) else { return };
    if !target.is_alive() {
        return;
    }
    let _ = kill_process(pid, signal); // It may have ended in between.
    std::thread::sleep(Duration::from_millis(100));
    if target.is_alive() {
        return;
    }
    target.add_violation(format!("the server ended at {signal:?}"));
    // Everything that follows would only say the same.
    wait_until(Duration::from_secs(1), "the end", || !target.is_alive());
}
