//! Attack on the model folder of the server: its weights file is replaced while the server runs.

use super::executors;
use super::target::{AttackTarget, REPLY_TIMEOUT};
use crate::http::host_faults::demo_copy;
use crate::http::weight_changes::{FILE, put};
use crate::http_client::get;
use crate::rng::SimRng;
use rustix::process::Signal;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Pause between two requests to `/readyz`.
const PAUSE: Duration = Duration::from_millis(5);

/// A copy of the demo model that only the attacked server uses.
pub(super) struct ServedModelFolder {
    folder: TempDir,
    weights: Vec<u8>,
}

impl ServedModelFolder {
    pub(super) fn new() -> Self {
        let folder = demo_copy();
        let weights = fs::read(folder.path().join(FILE)).unwrap();
        Self { folder, weights }
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns weights with the same header, so with the same names, types and shapes: one bit is changed, or
    /// one bit of each 32-bit word.
    fn changed_weights(&self, rng: &mut SimRng) -> Vec<u8> {
        let mut bytes = self.weights.clone();
        let header_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let values = &mut bytes[8 + header_bytes..];
        if rng.chance_per_mille(500) {
            let at = rng.below(values.len() as u64) as usize;
            values[at] ^= 1 << rng.below(8);
        } else {
            values.iter_mut().step_by(4).for_each(|byte| *byte ^= 1);
        }
        bytes
    }
}

/// Replaces the weights and kills the executors: the server must reject the changed weights by name until the
/// original weights are back, and then serve again.
pub(super) fn replace_weights(target: &AttackTarget, rng: &mut SimRng) {
    target.with_executor_outage("weights_replaced", || {
        put(target.model.path(), &target.model.changed_weights(rng));
        let executors = executors::signal_all(target, Signal::KILL);
        await_rejection(target);
        put(target.model.path(), &target.model.weights);
        executors::await_replacements(target, Signal::KILL, &executors);
    });
}

/// Waits until `/readyz` names the changed weights. Records a violation if this takes too long, or if the server
/// is ready again after its executors were killed.
fn await_rejection(target: &AttackTarget) {
    let (begun, mut failed) = (Instant::now(), false);
    while target.is_alive() {
        let reply = get(target.address, "/readyz");
        if reply.status == 503 && reply.json()["error"]["reason"] == "weights_changed" {
            return;
        }
        failed |= reply.status == 503;
        let text = String::from_utf8_lossy(&reply.body);
        if failed && reply.status == 200 {
            target.add_violation("the server is ready with changed weights".to_owned());
            return;
        }
        if begun.elapsed() > REPLY_TIMEOUT {
            target.add_violation(format!(
                "changed weights were not rejected within {REPLY_TIMEOUT:?}: {} {text}",
                reply.status
            ));
            return;
        }
        std::thread::sleep(PAUSE);
    }
}
