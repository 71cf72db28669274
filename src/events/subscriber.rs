//! Subscriber for KV events: it receives batches in order and fills gaps with replayed batches.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use zmq::{Context, Socket};

use super::source::PublisherEndpoints;
use crate::config::EventsSubscribeArgs;
use metrics::kv_events::{BatchArrival, SequenceNumberTracker};

/// Timeout for the next message of a replay, in milliseconds.
const REPLAY_WAIT_MS: i32 = 10_000;
/// Maximum number of batches in the receive queue. If it is full, the publisher drops batches.
const RECEIVE_BATCHES_MAX: i32 = 1_000_000;

/// A batch of KV events that has not been decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RawKvEventBatch {
    pub(super) topic: Vec<u8>,
    pub(super) seq: u64,
    pub(super) payload: Vec<u8>,
    /// Whether the batch was received from the replay endpoint instead of the live stream.
    pub(super) replayed: bool,
}

/// Result of `EventSubscriber::next`: a batch, or a fault of the stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SubscriptionEvent {
    Batch(RawKvEventBatch),
    /// Batches `from` to `to` are missing in the live stream. A replay returned `replayed` of these batches,
    /// which follow as `Batch` events.
    Gap {
        from: u64,
        to: u64,
        replayed: u64,
    },
    /// The publisher has restarted its sequence numbers. `seq` is the number of the first batch received
    /// after the restart.
    Restart {
        seq: u64,
    },
    /// A message that is not a valid batch, with the reason.
    Malformed(String),
}

/// Subscription to the KV events of one publisher.
pub(super) struct EventSubscriber {
    context: Context,
    live: Socket,
    replay: Option<String>,
    sequence: SequenceNumberTracker,
    /// Sequence number of the last replayed batch. Live batches with at most this number are duplicates and
    /// are skipped. `None` after a live batch with a larger number has arrived.
    replayed_to: Option<u64>,
    pending: VecDeque<SubscriptionEvent>,
    batches_left: Option<u64>,
    deadline: Option<Instant>,
}

impl EventSubscriber {
    /// Subscribes to the publisher. With `--from`, the batches of a replay are returned first.
    pub(super) fn open(
        args: &EventsSubscribeArgs,
        addresses: &PublisherEndpoints,
        duration: Option<Duration>,
    ) -> Result<Self> {
        let context = Context::new();
        let live = connect(&context, zmq::SUB, &addresses.publish)?;
        live.set_rcvhwm(RECEIVE_BATCHES_MAX)?;
        live.set_subscribe(args.topic.as_bytes())?;
        let mut subscriber = Self {
            context,
            live,
            replay: addresses.replay.clone(),
            sequence: SequenceNumberTracker::default(),
            replayed_to: None,
            pending: VecDeque::new(),
            batches_left: args.batches,
            deadline: duration.map(|duration| Instant::now() + duration),
        };
        if let Some(from) = args.from {
            if subscriber.replay.is_none() {
                return Err(anyhow!("--from {from}: the publisher has no replay endpoint"));
            }
            subscriber.sequence = SequenceNumberTracker::at(from);
            subscriber.fill(from)?;
        }
        Ok(subscriber)
    }

    /// Returns the next event; `None` after `--batches` batches or at the deadline.
    pub(super) fn next(&mut self) -> Result<Option<SubscriptionEvent>> {
        while self.pending.is_empty() {
            if self.batches_left == Some(0) {
                return Ok(None);
            }
            let wait_ms = match self.deadline {
                None => -1,
                Some(deadline) => match deadline.saturating_duration_since(Instant::now()) {
                    Duration::ZERO => return Ok(None),
                    left => left.as_millis() as i64 + 1,
                },
            };
            if self.live.poll(zmq::POLLIN, wait_ms)? > 0 {
                let frames = self.live.recv_multipart(0)?;
                self.receive(frames)?;
            }
        }
        let event = self.pending.pop_front();
        if let (Some(SubscriptionEvent::Batch(_)), Some(left)) = (&event, &mut self.batches_left) {
            if *left == 0 {
                return Ok(None);
            }
            *left -= 1;
        }
        Ok(event)
    }

    fn receive(&mut self, frames: Vec<Vec<u8>>) -> Result<()> {
        let batch = match batch(frames, false) {
            Ok(batch) => batch,
            Err(text) => {
                self.pending.push_back(SubscriptionEvent::Malformed(text));
                return Ok(());
            }
        };
        match self.sequence.check(batch.seq) {
            BatchArrival::Next => self.replayed_to = None,
            BatchArrival::Duplicate if self.replayed_to.is_some_and(|to| batch.seq <= to) => {
                return Ok(());
            }
            BatchArrival::Duplicate => {
                self.pending.push_back(SubscriptionEvent::Restart { seq: batch.seq });
                self.sequence = SequenceNumberTracker::at(0);
                self.fill(0)?;
                if self.sequence.check(batch.seq) == BatchArrival::Duplicate {
                    return Ok(()); // The replay contained this batch.
                }
            }
            BatchArrival::Gap { from } => {
                self.pending.push_back(SubscriptionEvent::Gap {
                    from,
                    to: batch.seq - 1,
                    replayed: 0,
                });
                let gap_index = self.pending.len() - 1;
                let replayed = self.fill(from)?;
                self.pending[gap_index] =
                    SubscriptionEvent::Gap { from, to: batch.seq - 1, replayed };
                if self.sequence.check(batch.seq) == BatchArrival::Duplicate {
                    return Ok(()); // The replay contained this batch.
                }
            }
        }
        self.sequence.advance(batch.seq);
        self.pending.push_back(SubscriptionEvent::Batch(batch));
        Ok(())
    }

    /// Requests a replay from sequence number `from` and queues its batches. Returns their number; 0 if the
    /// publisher has no replay endpoint.
    fn fill(&mut self, from: u64) -> Result<u64> {
        let batches = self.replay(from)?;
        let replayed = batches.len() as u64;
        for batch in batches {
            self.sequence.advance(batch.seq);
            self.replayed_to = Some(batch.seq);
            self.pending.push_back(SubscriptionEvent::Batch(batch));
        }
        Ok(replayed)
    }

    /// Requests a replay from sequence number `from` and returns its batches.
    pub(super) fn replay(&self, from: u64) -> Result<Vec<RawKvEventBatch>> {
        let Some(endpoint) = &self.replay else { return Ok(Vec::new()) };
        let dealer = connect(&self.context, zmq::DEALER, endpoint)?;
        dealer.set_rcvhwm(0)?;
        dealer.set_rcvtimeo(REPLAY_WAIT_MS)?;
        dealer.send_multipart([b"".as_slice(), &from.to_be_bytes()], 0)?;
        let mut batches = Vec::new();
        loop {
            let mut frames =
                dealer.recv_multipart(0).with_context(|| format!("no replay from {endpoint}"))?;
            if frames.first().is_none_or(|delimiter| !delimiter.is_empty()) {
                return Err(anyhow!("{endpoint}: the reply has no delimiter frame"));
            }
            frames.remove(0);
            let batch = batch(frames, true).map_err(|text| anyhow!("{endpoint}: {text}"))?;
            if batch.seq == u64::MAX {
                return Ok(batches);
            }
            batches.push(batch);
        }
    }

    /// Whether the publisher has a replay endpoint, so that gaps can be filled.
    pub(super) fn replays(&self) -> bool {
        self.replay.is_some()
    }
}

fn connect(context: &Context, kind: zmq::SocketType, endpoint: &str) -> Result<Socket> {
    let open = || {
        let socket = context.socket(kind)?;
        socket.set_linger(0)?;
        socket.set_ipv6(endpoint.starts_with("tcp://["))?;
        socket.connect(endpoint)?;
        Ok(socket)
    };
    open().map_err(|error: zmq::Error| match error {
        zmq::Error::EINVAL | zmq::Error::EPROTONOSUPPORT => {
            anyhow!("{endpoint} is not an endpoint such as tcp://127.0.0.1:5557 or ipc://PATH")
        }
        error => anyhow!("{endpoint}: {error}"),
    })
}

/// Parses the three frames of a batch (topic, sequence number, payload), or returns an error message.
fn batch(frames: Vec<Vec<u8>>, replayed: bool) -> Result<RawKvEventBatch, String> {
    let count = frames.len();
    let [topic, seq, payload] =
        <[Vec<u8>; 3]>::try_from(frames).map_err(|_| format!("{count} frames, expected 3"))?;
    let bytes = seq.len();
    let seq = <[u8; 8]>::try_from(seq)
        .map_err(|_| format!("a sequence number of {bytes} bytes, expected 8"))?;
    Ok(RawKvEventBatch { topic, seq: u64::from_be_bytes(seq), payload, replayed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_counted_and_measured() {
        let parsed = |frames: &[&[u8]]| batch(frames.iter().map(|f| f.to_vec()).collect(), false);
        assert_eq!(parsed(&[b"t", &7_u64.to_be_bytes(), b"p"]).map(|b| b.seq), Ok(7));
        assert_eq!(parsed(&[b"t", b"p"]), Err("2 frames, expected 3".to_owned()));
        let result = parsed(&[b"t", b"7", b"p"]);
        assert_eq!(result, Err("a sequence number of 1 bytes, expected 8".to_owned()));
    }

    #[test]
    fn duplicates_are_dropped_and_restart_is_detected() {
        let context = Context::new();
        let live = context.socket(zmq::SUB).unwrap();
        let mut subscriber = EventSubscriber {
            context,
            live,
            replay: None,
            sequence: SequenceNumberTracker::at(11),
            replayed_to: Some(10),
            pending: VecDeque::new(),
            batches_left: None,
            deadline: None,
        };
        let mut receive = |seq: u64| -> Vec<String> {
            let frames = vec![Vec::new(), seq.to_be_bytes().to_vec(), Vec::new()];
            subscriber.receive(frames).unwrap();
            let describe = |event| match event {
                SubscriptionEvent::Batch(batch) => format!("batch {}", batch.seq),
                other => format!("{other:?}"),
            };
            subscriber.pending.drain(..).map(describe).collect()
        };
        assert_eq!(receive(10), Vec::<String>::new());
        assert_eq!(receive(11), ["batch 11"]);
        assert_eq!(receive(0), ["Restart { seq: 0 }", "batch 0"]);
        assert_eq!(receive(1), ["batch 1"]);
    }
}
