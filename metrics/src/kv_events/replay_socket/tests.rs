//! Tests of the ROUTER socket: its requests and the memory that they use.

use super::*;

fn requests(frames: &[&[u8]]) -> Vec<ReplayRequest> {
    let mut request = ReplayRequestReader::default();
    let last = frames.len() - 1;
    let take = |(i, body): (usize, &&[u8])| {
        request.take(
            ZmtpFrameHead { is_command: false, has_more: i < last, is_body_complete: true },
            body,
        )
    };
    frames.iter().enumerate().filter_map(take).collect()
}

#[test]
fn other_shapes_are_malformed_requests() {
    let start = 258_u64.to_be_bytes();
    assert_eq!(requests(&[b"", &start]), [ReplayRequest::From(258)]);
    for wrong in [
        &[&start[..]][..],
        &[b"x", &start],
        &[b"", b"258"],
        &[b"", &start, b""],
        &[b"id", b"", &start],
        &[b""],
    ] {
        assert_eq!(requests(wrong), [ReplayRequest::Malformed], "{wrong:?}");
    }
}

#[test]
fn endless_request_message_uses_no_memory() {
    let mut request = ReplayRequestReader::default();
    let more = ZmtpFrameHead { is_command: false, has_more: true, is_body_complete: true };
    for _ in 0..100_000 {
        assert_eq!(request.take(more, b"12345678"), None);
    }
    let last = ZmtpFrameHead { has_more: false, ..more };
    assert_eq!(request.take(last, b""), Some(ReplayRequest::Malformed));
    assert_eq!(request, ReplayRequestReader::default());
}
