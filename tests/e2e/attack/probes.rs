//! Health probes during attacks: a server that serves must report that it is ready.

use super::target::{AttackTarget, REPLY_TIMEOUT};
use crate::http_client::{HttpClient, connect_within};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Pause between two rounds; a round requests every probe once.
const PAUSE: Duration = Duration::from_millis(25);
/// Maximum latency of a probe. It is large, because the attacks load the same machine.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Client that requests all health probes repeatedly during the attacks.
pub(super) struct HealthProbeChecker;

impl HealthProbeChecker {
    /// Requests the probes until the attacks are over; returns the number of replies.
    pub(super) fn run(target: &AttackTarget, over: &AtomicBool) -> u64 {
        let mut answers = 0;
        while !over.load(Ordering::Relaxed) {
            for path in ["/livez", "/readyz", "/health"] {
                answers += u64::from(Self::probe(target, path));
            }
            std::thread::sleep(PAUSE);
        }
        answers
    }

    /// Requests one probe; returns whether it got a reply. Records a violation if the status contradicts the
    /// server's state.
    fn probe(target: &AttackTarget, path: &str) -> bool {
        let (before, began) = (target.outage(), Instant::now());
        let status = status_of(target, path);
        let took = began.elapsed();
        // `calm`: no executor outage that an attack caused overlapped the probe. During such an outage 503 is
        // correct: a step past its deadline makes all probes report unready.
        let calm = before == target.outage() && !AttackTarget::is_outage(before);
        match status {
            Some(200) => {}
            Some(503) if !calm || Self::is_executor_outage(target, path) => {}
            other => target.add_violation(format!("{path}: {other:?} after {took:?}")),
        }
        if took > ANSWER_MAX {
            target.add_violation(format!("{path}: reply after {took:?}"));
        }
        status.is_some()
    }

    /// Whether a 503 reply is explained by an executor failure that no attack caused. Waits until the
    /// executors' process ids differ from the last observed process ids, or until the probe succeeds again.
    fn is_executor_outage(target: &AttackTarget, path: &str) -> bool {
        let since = Instant::now();
        while since.elapsed() < REPLY_TIMEOUT && target.is_alive() {
            if target.executors_changed() {
                return true;
            }
            if status_of(target, path) == Some(200) {
                return target.executors_changed();
            }
            std::thread::sleep(PAUSE);
        }
        false
    }
}

fn status_of(target: &AttackTarget, path: &str) -> Option<u16> {
    let mut client = HttpClient::of(connect_within(target.address, REPLY_TIMEOUT).ok()?);
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    client.send_raw(request.as_bytes()).ok()?;
    Some(client.read()?.status)
}
