//! Message to a peer, of which a part may have been sent.

use std::io::IoSlice;
use std::sync::Arc;

/// Message to a peer, in wire format.
#[derive(Debug)]
pub(crate) struct OutgoingMessage {
    /// Frames of the message, without the body of the last frame.
    pub(crate) head: Vec<u8>,
    /// Body of the last frame, which the journal and the other connections share.
    pub(crate) payload: Arc<[u8]>,
}

impl OutgoingMessage {
    /// Size of the message on the wire, in bytes.
    pub(crate) fn len(&self) -> usize {
        self.head.len() + self.payload.len()
    }

    pub(super) fn from(&self, offset: usize) -> [IoSlice<'_>; 2] {
        let in_payload = offset.saturating_sub(self.head.len());
        let head = self.head.get(offset..).unwrap_or_default();
        [IoSlice::new(head), IoSlice::new(&self.payload[in_payload..])]
    }
}
