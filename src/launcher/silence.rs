//! When a process that should give a sign of life every second is taken for gone.

use protocol::link::{LinkError, Receiving};
use std::time::Duration;

/// Time without one.
pub(super) const SILENCE: Duration = Duration::from_secs(5);
/// Had this process been paused, what arrived meanwhile is there at once.
pub(super) const SECOND_LOOK: Duration = Duration::from_secs(1);

/// The next message; `None` = there was no sign of life for too long.
pub(super) fn heard<R: Receiving + ?Sized>(link: &mut R) -> Result<Option<R::Message>, LinkError> {
    match link.recv(SILENCE)? {
        None => link.recv(SECOND_LOOK),
        message => Ok(message),
    }
}
