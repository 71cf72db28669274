//! Attacks by signals that must not end the server.

use super::target::AttackTarget;
use crate::rng::SimRng;
use rustix::process::{Pid, Signal, kill_process};
use std::time::Duration;

/// Sends signals of a closing terminal, a log rotation or a window resize.
pub(super) fn harmless(target: &AttackTarget, rng: &mut SimRng) {
    let signal = rng.pick(&[
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
    let _ = kill_process(pid, signal); // The process may have exited.
    std::thread::sleep(Duration::from_millis(100));
    if !target.is_alive() {
        target.add_violation(format!("the server ended at {signal:?}"));
    }
}
