//! Helpers for tests of KV events: configuration of a publisher, and a request for a replay.

#![allow(dead_code, reason = "each test binary uses a part")]

use hadron::config::{CliCommand, ProcessEnvironment, parse};
use metrics::kv_events::KvEventsConfig;
use serde_json::{Value, json};
use zmq::Context;

/// Returns the configuration of a KV-event publisher on free loopback ports. The keys in `extra` are added to
/// it.
pub(crate) fn config(extra: &Value) -> KvEventsConfig {
    let mut keys = json!({"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:0",
                          "replay_endpoint": "tcp://127.0.0.1:0"});
    keys.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let words = ["hadron", "serve", "M", "--kv-events-config", &keys.to_string()];
    let invocation = parse(words.map(Into::into).to_vec(), ProcessEnvironment::default()).unwrap();
    let CliCommand::Serve(args) = invocation.command else { panic!("not serve") };
    args.kv_events.enabled().unwrap()
}

/// Requests a replay from sequence number `start` on; returns the sequence number and payload of each batch.
/// Panics if the replay does not end with its end marker.
pub(crate) fn replay(endpoint: &str, start: u64, wait_ms: i32) -> Vec<(u64, Vec<u8>)> {
    let dealer = Context::new().socket(zmq::DEALER).unwrap();
    dealer.set_rcvtimeo(wait_ms).unwrap();
    dealer.connect(endpoint).unwrap();
    dealer.send_multipart([b"".as_slice(), &start.to_be_bytes()], 0).unwrap();
    let mut batches = Vec::new();
    loop {
        let frames = dealer.recv_multipart(0).unwrap();
        let [delimiter, topic, seq, payload] = <[Vec<u8>; 4]>::try_from(frames).unwrap();
        assert!(delimiter.is_empty());
        if seq == [0xff; 8] {
            assert!(topic.is_empty() && payload.is_empty());
            return batches;
        }
        batches.push((sequence_number(&seq), payload));
    }
}

/// Decodes the sequence number in a frame of a batch.
pub(crate) fn sequence_number(frame: &[u8]) -> u64 {
    u64::from_be_bytes(frame.try_into().unwrap())
}
