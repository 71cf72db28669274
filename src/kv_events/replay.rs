//! The ROUTER socket: answers replay requests, a few messages at a time.

use super::figures::{Figures, count};
use super::journal::{Entry, Journal};
use std::collections::VecDeque;
use zmq::{DONTWAIT, Socket};

/// Messages sent before live batches get a turn.
const MESSAGES_PER_TURN: usize = 64;
/// Requests in the making; more wait in the socket.
const REQUESTS_MAX: usize = 16;
/// Sequence of the end marker.
const END: [u8; 8] = [0xff; 8];

/// Answers in the making.
pub(super) struct ReplayDesk {
    pub(super) router: Socket,
    topic: Vec<u8>,
    pending: VecDeque<Answer>,
}

struct Answer {
    peer: Vec<u8>,
    entries: std::vec::IntoIter<Entry>,
}

impl ReplayDesk {
    pub(super) fn new(router: Socket, topic: &str) -> Self {
        Self { router, topic: topic.as_bytes().to_vec(), pending: VecDeque::new() }
    }

    /// Takes requests in and sends some of what is due; whether there is more to do at once.
    pub(super) fn turn(&mut self, now: f64, journal: &mut Journal, figures: &Figures) -> bool {
        while self.pending.len() < REQUESTS_MAX {
            let Ok(frames) = self.router.recv_multipart(DONTWAIT) else { break };
            let Some((peer, start)) = request(frames) else {
                count(&figures.malformed, 1);
                continue;
            };
            match journal.replay(now, start) {
                Ok(replay) => {
                    count(&figures.replays, 1);
                    count(&figures.snapshots, u64::from(replay.is_snapshot));
                    self.pending.push_back(Answer { peer, entries: replay.entries.into_iter() });
                }
                Err(_) => count(&figures.errors, 1),
            }
        }
        for _ in 0..MESSAGES_PER_TURN {
            let Some(mut answer) = self.pending.pop_front() else { return false };
            if let Some(entry) = answer.entries.next() {
                self.send(
                    &answer.peer,
                    &self.topic,
                    entry.seq.to_be_bytes(),
                    &entry.payload,
                    figures,
                );
                count(&figures.replayed, 1);
                self.pending.push_back(answer);
            } else {
                self.send(&answer.peer, b"", END, b"", figures);
            }
        }
        !self.pending.is_empty()
    }

    fn send(&self, peer: &[u8], topic: &[u8], seq: [u8; 8], payload: &[u8], figures: &Figures) {
        // What is due to a peer that left, or that reads nothing, is dropped by the socket.
        if self.router.send_multipart([peer, b"", topic, &seq, payload], DONTWAIT).is_err() {
            count(&figures.errors, 1);
        }
    }
}

/// Who asks, and from which number on; `None` if the message is not `[id, "", u64 BE]`.
pub fn request(frames: Vec<Vec<u8>>) -> Option<(Vec<u8>, u64)> {
    let [peer, delimiter, start] = <[Vec<u8>; 3]>::try_from(frames).ok()?;
    let start = <[u8; 8]>::try_from(start).ok()?;
    delimiter.is_empty().then(|| (peer, u64::from_be_bytes(start)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_shapes_are_no_requests() {
        let ask = |frames: &[&[u8]]| request(frames.iter().map(|f| f.to_vec()).collect());
        let start = 258_u64.to_be_bytes();
        assert_eq!(ask(&[b"id", b"", &start]), Some((b"id".to_vec(), 258)));
        assert_eq!(ask(&[b"id", &start]), None);
        assert_eq!(ask(&[b"id", b"x", &start]), None);
        assert_eq!(ask(&[b"id", b"", b"258"]), None);
        assert_eq!(ask(&[b"id", b"", &start, b""]), None);
        assert_eq!(ask(&[]), None);
    }
}
