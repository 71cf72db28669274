//! Requests for a replay of KV events, and the payloads of batches, which subscribers read.

use hadron::kv_events::{decode, replay_request};

pub(crate) fn run(data: &[u8]) {
    let _ = decode(data); // Refusals are the rule.
    // The first byte of each frame is its length, as far as there are bytes.
    let (mut frames, mut rest) = (Vec::new(), data);
    while let Some((&length, behind)) = rest.split_first() {
        let (frame, behind) = behind.split_at(behind.len().min(usize::from(length)));
        frames.push(frame.to_vec());
        rest = behind;
    }
    let read = replay_request(frames.clone());
    let is_one = frames.len() == 3 && frames[1].is_empty() && frames[2].len() == 8;
    assert_eq!(read.is_some(), is_one);
}
