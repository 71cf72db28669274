//! Receives messages, with a heartbeat timeout, from processes that send a heartbeat every second.

pub(super) use scheduler::{HEARTBEAT_GRACE_PERIOD, HEARTBEAT_TIMEOUT};

use protocol::link::{LinkError, MessageReceiver};
use scheduler::HeartbeatMonitor;

/// Returns the next message on the link; `None` if no message arrives within the heartbeat timeout plus the
/// grace period.
pub(super) fn recv_within_timeout<R: MessageReceiver + ?Sized>(
    link: &mut R,
) -> Result<Option<R::Message>, LinkError> {
    let mut monitor = HeartbeatMonitor::default();
    loop {
        if let Some(message) = link.recv(monitor.timeout())? {
            return Ok(Some(message));
        }
        if monitor.on_timeout() {
            return Ok(None);
        }
    }
}
