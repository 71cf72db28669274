//! Tests that every message survives a round trip, and that corrupt bytes are rejected without a panic.

use crate::messages::{
    executor_command, executor_event, handshake, node_command, node_event, settings,
};
use proptest::prelude::*;
use protocol::codec::{CodecError, WireMessage};
use protocol::frame::{BODY_BYTES_MAX, FrameError, HEADER_BYTES, decode, encode};
use protocol::{
    Epoch, ExecutorCommand, ExecutorEvent, ExecutorSettings, NodeCommand, NodeEvent, NodeHandshake,
    PROTOCOL_VERSION,
};

fn frame<M: WireMessage>(message: &M, epoch: Epoch) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(message, epoch, &mut bytes).unwrap();
    bytes
}

/// Encodes and decodes a message. Then decodes its frame truncated to `cut` bytes, and its frame followed by
/// that truncated frame.
fn assert_round_trip<M: WireMessage + PartialEq + std::fmt::Debug>(
    message: &M,
    epoch: u64,
    cut: usize,
) {
    let bytes = frame(message, Epoch(epoch));
    let decoded = decode::<M>(&bytes).unwrap().expect("a complete frame");
    assert_eq!(&decoded.message, message);
    assert_eq!((decoded.epoch, decoded.frame_bytes), (Epoch(epoch), bytes.len()));
    let cut = cut % bytes.len();
    assert!(decode::<M>(&bytes[..cut]).unwrap().is_none(), "cut at {cut} of {}", bytes.len());
    let two = [&bytes[..], &bytes[..cut]].concat();
    assert_eq!(decode::<M>(&two).unwrap().map(|frame| frame.frame_bytes), Some(bytes.len()));
}

/// Decodes bytes as every message type; must not panic.
fn decode_as_every_type(bytes: &[u8]) {
    let _ = decode::<ExecutorSettings>(bytes);
    let _ = decode::<ExecutorCommand>(bytes);
    let _ = decode::<ExecutorEvent>(bytes);
    let _ = decode::<NodeHandshake>(bytes);
    let _ = decode::<NodeCommand>(bytes);
    let _ = decode::<NodeEvent>(bytes);
}

/// Decodes a body as every message kind; must not panic.
fn decode_body_as_every_kind(body: &[u8]) {
    for kind in 0..50 {
        let _ = ExecutorSettings::decode(kind, body);
        let _ = ExecutorCommand::decode(kind, body);
        let _ = ExecutorEvent::decode(kind, body);
        let _ = NodeHandshake::decode(kind, body);
        let _ = NodeCommand::decode(kind, body);
        let _ = NodeEvent::decode(kind, body);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn executor_commands_round_trip(m in executor_command(), epoch: u64, cut: usize) {
        assert_round_trip(&m, epoch, cut);
    }

    #[test]
    fn executor_events_round_trip(m in executor_event(), epoch: u64, cut: usize) {
        assert_round_trip(&m, epoch, cut);
    }

    #[test]
    fn executor_settings_round_trip(m in settings(), epoch: u64, cut: usize) {
        assert_round_trip(&m, epoch, cut);
    }

    #[test]
    fn node_messages_round_trip(
        h in handshake(), t in node_command(), f in node_event(), epoch: u64, cut: usize,
    ) {
        assert_round_trip(&h, epoch, cut);
        assert_round_trip(&t, epoch, cut);
        assert_round_trip(&f, epoch, cut);
    }

    #[test]
    fn any_changed_byte_is_detected(m in executor_command(), at: usize, change in 1..=255_u8) {
        let mut bytes = frame(&m, Epoch(3));
        let at = at % bytes.len();
        bytes[at] ^= change;
        // A corrupt, larger length field only makes the frame incomplete, which is no error.
        let detected = match decode::<ExecutorCommand>(&bytes) {
            Err(_) => true,
            Ok(None) => (16..20).contains(&at),
            Ok(Some(_)) => false,
        };
        prop_assert!(detected, "byte {} of {}", at, bytes.len());
    }

    #[test]
    fn garbage_is_an_error_or_an_incomplete_frame(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        decode_as_every_type(&bytes);
        decode_as_every_type(&[b"HDRN\x01\x00", &bytes[..]].concat());
        decode_body_as_every_kind(&bytes);
    }

    #[test]
    fn broken_bodies_are_errors(
        m in executor_event(),
        b in executor_command(),
        n in node_event(),
        changes in prop::collection::vec(byte_change(), 1..4),
        cut: usize,
    ) {
        for mut body in [body_of(&m), body_of(&b), body_of(&n)] {
            for ByteChange { at, byte } in &changes {
                let length = body.len().max(1);
                if let Some(byte_at) = body.get_mut(at % length) {
                    *byte_at = *byte;
                }
            }
            decode_body_as_every_kind(&body);
            decode_body_as_every_kind(&body[..cut % (body.len() + 1)]);
        }
    }
}

/// Change of the byte at the position `at`, modulo the length of the changed bytes.
#[derive(Debug, Clone)]
struct ByteChange {
    at: usize,
    byte: u8,
}

fn byte_change() -> impl Strategy<Value = ByteChange> {
    (any::<usize>(), any::<u8>()).prop_map(|(at, byte)| ByteChange { at, byte })
}

fn body_of<M: WireMessage>(message: &M) -> Vec<u8> {
    let mut body = Vec::new();
    message.encode(&mut body).unwrap();
    body
}

#[test]
fn each_frame_defect_has_its_own_error() {
    let good = frame(&ExecutorCommand::AllocateKv { blocks: 7 }, Epoch(1));
    let with = |at: usize, bytes: &[u8]| {
        let mut frame = good.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        decode::<ExecutorCommand>(&frame).unwrap_err()
    };
    assert_eq!(with(0, b"HTTP"), FrameError::Magic(*b"HTTP"));
    assert_eq!(
        with(4, &[255, 255]),
        FrameError::Version { theirs: u16::MAX, ours: PROTOCOL_VERSION }
    );
    let bytes = u32::MAX as usize;
    assert_eq!(with(16, &[255; 4]), FrameError::TooLong { bytes, limit: BODY_BYTES_MAX });
    assert!(matches!(with(HEADER_BYTES, &[0]), FrameError::Checksum { .. }));
    assert_eq!(
        decode::<ExecutorEvent>(&good).unwrap_err(),
        FrameError::Body(CodecError::UnknownKind(2)),
        "a message kind of the other direction"
    );
    let trailing = ExecutorCommand::decode(4, &[0]).unwrap_err();
    assert_eq!(trailing, CodecError::Trailing { kind: 4, left: 1 });
    let text = ExecutorCommand::decode(2, &[0x91, 0xa1, b'x']).unwrap_err().to_string();
    assert!(text.contains("message kind 2, 3 bytes, cannot be decoded"), "{text}");
}
