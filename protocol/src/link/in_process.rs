//! A link between two threads: two bounded channels. A dropped end is the death signal.

use super::{Link, LinkError};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

/// One end of an in-process link.
pub struct InProcess<O, I> {
    out: SyncSender<O>,
    inbox: Receiver<I>,
}

/// Two connected ends; each direction holds up to `capacity` messages.
pub fn pair<A, B>(capacity: usize) -> (InProcess<A, B>, InProcess<B, A>) {
    let (a_out, b_in) = sync_channel(capacity);
    let (b_out, a_in) = sync_channel(capacity);
    (InProcess { out: a_out, inbox: a_in }, InProcess { out: b_out, inbox: b_in })
}

impl<O, I> InProcess<O, I> {
    /// Splits the end into its two directions, for owners that send and receive on different threads.
    pub fn split(self) -> (SyncSender<O>, Receiver<I>) {
        (self.out, self.inbox)
    }
}

impl<O, I> Link for InProcess<O, I> {
    type Out = O;
    type In = I;

    fn send(&mut self, message: O) -> Result<(), LinkError> {
        self.out.send(message).map_err(|_| LinkError::Closed)
    }

    fn recv(&mut self, timeout: Duration) -> Result<Option<I>, LinkError> {
        match self.inbox.recv_timeout(timeout) {
            Ok(message) => Ok(Some(message)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(LinkError::Closed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_in_order_and_the_end_is_seen() {
        let (mut a, mut b) = pair::<u32, &str>(4);
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
