//! Listens to processes that give a sign of life every second.

pub(super) use scheduler::{SECOND_LOOK, SILENCE};

use protocol::link::{LinkError, Receiving};
use scheduler::Silence;

/// The next message; `None` = there was no sign of life for too long.
pub(super) fn heard<R: Receiving + ?Sized>(link: &mut R) -> Result<Option<R::Message>, LinkError> {
    let mut silence = Silence::default();
    loop {
        if let Some(message) = link.recv(silence.patience())? {
            return Ok(Some(message));
        }
        if silence.lasts() {
            return Ok(None);
        }
    }
}
