//! Ring of recent messages, shared by all subscribers. A subscriber stores only its position in the ring.

use super::zmtp::OutgoingMessage;
use std::collections::VecDeque;
use std::sync::Arc;

/// Messages that have not been sent to all subscribers, limited in number and in bytes. A slow subscriber
/// misses the oldest messages.
#[derive(Debug)]
pub(super) struct MessageRing {
    messages: VecDeque<Arc<OutgoingMessage>>,
    /// Position of the oldest message in `messages`: number of messages that have left the ring.
    first: u64,
    bytes: u64,
    len_max: usize,
    bytes_max: u64,
}

impl MessageRing {
    /// Creates a ring of at most `len_max` messages and `bytes_max` bytes. One message is accepted whatever
    /// its size.
    pub(super) fn new(len_max: usize, bytes_max: u64) -> Self {
        Self { messages: VecDeque::new(), first: 0, bytes: 0, len_max, bytes_max }
    }

    /// Position of the next message to be added.
    pub(super) fn end(&self) -> u64 {
        self.first + self.messages.len() as u64
    }

    /// Whether adding a message of `bytes` bytes evicts other messages.
    pub(super) fn would_evict(&self, bytes: usize) -> bool {
        !self.messages.is_empty()
            && (self.messages.len() >= self.len_max || self.bytes + bytes as u64 > self.bytes_max)
    }

    /// Adds a message; evicts the oldest ones as needed.
    pub(super) fn push(&mut self, message: OutgoingMessage) {
        while self.would_evict(message.len()) {
            self.pop();
        }
        self.bytes += message.len() as u64;
        self.messages.push_back(Arc::new(message));
    }

    /// Returns the message at a position, or the oldest one if that was evicted, and advances the position
    /// past it.
    pub(super) fn take(&self, position: &mut u64) -> Option<Arc<OutgoingMessage>> {
        let at = (*position).max(self.first);
        let message = self.messages.get((at - self.first) as usize)?;
        *position = at + 1;
        Some(Arc::clone(message))
    }

    /// Discards the messages before a position, which no subscriber needs any more.
    pub(super) fn discard_before(&mut self, before: u64) {
        while self.first < before && !self.messages.is_empty() {
            self.pop();
        }
    }

    fn pop(&mut self) {
        if let Some(oldest) = self.messages.pop_front() {
            self.bytes -= oldest.len() as u64;
            self.first += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(number: u8, bytes: usize) -> OutgoingMessage {
        OutgoingMessage { head: vec![number], payload: vec![number; bytes - 1].into() }
    }

    fn rest(ring: &MessageRing, position: &mut u64) -> Vec<u8> {
        std::iter::from_fn(|| ring.take(position)).map(|message| message.head[0]).collect()
    }

    #[test]
    fn slow_subscribers_miss_the_oldest_messages() {
        let mut ring = MessageRing::new(3, 100);
        let (mut slow, mut prompt) = (ring.end(), ring.end());
        for number in 0..5 {
            ring.push(message(number, 10));
            assert_eq!(rest(&ring, &mut prompt), [number]);
        }
        assert_eq!(rest(&ring, &mut slow), [2, 3, 4]);
        ring.push(message(5, 95));
        ring.push(message(6, 200));
        assert_eq!((rest(&ring, &mut slow), ring.bytes), (vec![6], 200));
    }

    #[test]
    fn messages_that_every_subscriber_has_are_forgotten() {
        let mut ring = MessageRing::new(10, 1_000);
        (0..5).for_each(|number| ring.push(message(number, 10)));
        ring.discard_before(3);
        assert_eq!((rest(&ring, &mut 0), ring.bytes), (vec![3, 4], 20));
        ring.discard_before(9);
        assert_eq!((ring.end(), ring.bytes), (5, 0));
    }
}
