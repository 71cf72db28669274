//! A link between two threads: two bounded channels. Dropping an end closes the link.

use super::{LinkError, LinkHalves, MessageReceiver, MessageSender};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

/// One end of an in-process link.
pub type InProcessLink<O, I> = LinkHalves<SyncSender<O>, Receiver<I>>;

/// Creates two connected ends; each direction buffers up to `capacity` messages.
pub fn in_process_pair<A, B>(capacity: usize) -> (InProcessLink<A, B>, InProcessLink<B, A>) {
    let (a_out, b_in) = sync_channel(capacity);
    let (b_out, a_in) = sync_channel(capacity);
    (LinkHalves { sender: a_out, receiver: a_in }, LinkHalves { sender: b_out, receiver: b_in })
}

impl<M> MessageSender for SyncSender<M> {
    type Message = M;

    fn send(&mut self, message: M) -> Result<(), LinkError> {
        SyncSender::send(self, message).map_err(|_| LinkError::Closed)
    }
}

impl<M> MessageReceiver for Receiver<M> {
    type Message = M;

    fn recv(&mut self, timeout: Duration) -> Result<Option<M>, LinkError> {
        match self.recv_timeout(timeout) {
            Ok(message) => Ok(Some(message)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(LinkError::Closed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::MessageLink;

    #[test]
    fn in_process_link_delivers_in_order_and_reports_close() {
        let (mut a, mut b) = in_process_pair::<u32, &str>(4);
        a.send(1).unwrap();
        a.send(2).unwrap();
        b.send("reply").unwrap();
        assert_eq!(b.recv(Duration::ZERO), Ok(Some(1)));
        assert_eq!(a.recv(Duration::ZERO), Ok(Some("reply")));
        drop(a);
        assert_eq!(b.recv(Duration::ZERO), Ok(Some(2)));
        assert_eq!(b.recv(Duration::from_secs(1)), Err(LinkError::Closed));
        assert_eq!(b.send("late"), Err(LinkError::Closed));
    }
}
