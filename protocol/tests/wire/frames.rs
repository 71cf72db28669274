//! Every message survives its frame; no bytes survive as something they are not, and none panics.

use crate::messages::{from_executor, from_node, handshake, settings, to_executor, to_node};
use proptest::prelude::*;
use protocol::codec::{CodecError, Message};
use protocol::frame::{BODY_BYTES_MAX, FrameError, HEADER_BYTES, decode, encode};
use protocol::{
    Epoch, FromExecutor, FromNode, Handshake, PROTOCOL_VERSION, Settings, ToExecutor, ToNode,
};

fn frame<M: Message>(message: &M, epoch: Epoch) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(message, epoch, &mut bytes).unwrap();
    bytes
}

/// Encodes, decodes, and cuts the frame everywhere.
fn survives<M: Message + PartialEq + std::fmt::Debug>(message: &M, epoch: u64, cut: usize) {
    let bytes = frame(message, Epoch(epoch));
    let (back, back_epoch, length) = decode::<M>(&bytes).unwrap().expect("a whole frame");
    assert_eq!((&back, back_epoch, length), (message, Epoch(epoch), bytes.len()));
    let cut = cut % bytes.len();
    assert!(decode::<M>(&bytes[..cut]).unwrap().is_none(), "cut at {cut} of {}", bytes.len());
    let two = [&bytes[..], &bytes[..cut]].concat();
    assert_eq!(decode::<M>(&two).unwrap().map(|(_, _, length)| length), Some(bytes.len()));
}

/// Reads bytes as every message there is; only must not panic.
fn read_as_all(bytes: &[u8]) {
    let _ = decode::<Settings>(bytes);
    let _ = decode::<ToExecutor>(bytes);
    let _ = decode::<FromExecutor>(bytes);
    let _ = decode::<Handshake>(bytes);
    let _ = decode::<ToNode>(bytes);
    let _ = decode::<FromNode>(bytes);
}

/// Reads a body as every kind there is; only must not panic.
fn read_body_as_all(body: &[u8]) {
    for kind in 0..50 {
        let _ = Settings::decode(kind, body);
        let _ = ToExecutor::decode(kind, body);
        let _ = FromExecutor::decode(kind, body);
        let _ = Handshake::decode(kind, body);
        let _ = ToNode::decode(kind, body);
        let _ = FromNode::decode(kind, body);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn the_schedulers_messages_survive(m in to_executor(), epoch: u64, cut: usize) {
        survives(&m, epoch, cut);
    }

    #[test]
    fn the_executors_messages_survive(m in from_executor(), epoch: u64, cut: usize) {
        survives(&m, epoch, cut);
    }

    #[test]
    fn settings_survive(m in settings(), epoch: u64, cut: usize) {
        survives(&m, epoch, cut);
    }

    #[test]
    fn the_nodes_messages_survive(
        h in handshake(), t in to_node(), f in from_node(), epoch: u64, cut: usize,
    ) {
        survives(&h, epoch, cut);
        survives(&t, epoch, cut);
        survives(&f, epoch, cut);
    }

    #[test]
    fn any_changed_byte_is_noticed(m in to_executor(), at: usize, change in 1..=255_u8) {
        let mut bytes = frame(&m, Epoch(3));
        let at = at % bytes.len();
        bytes[at] ^= change;
        // A longer length only means that the frame has not arrived yet.
        let noticed = match decode::<ToExecutor>(&bytes) {
            Err(_) => true,
            Ok(None) => (16..20).contains(&at),
            Ok(Some(_)) => false,
        };
        prop_assert!(noticed, "byte {} of {}", at, bytes.len());
    }

    #[test]
    fn garbage_is_an_error_or_not_yet_a_frame(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        read_as_all(&bytes);
        read_as_all(&[b"HDRN\x01\x00", &bytes[..]].concat());
        read_body_as_all(&bytes);
    }

    #[test]
    fn broken_bodies_are_errors(
        m in from_executor(),
        b in to_executor(),
        n in from_node(),
        changes in prop::collection::vec((any::<usize>(), any::<u8>()), 1..4),
        cut: usize,
    ) {
        for mut body in [body_of(&m), body_of(&b), body_of(&n)] {
            for (at, byte) in &changes {
                let length = body.len().max(1);
                if let Some(place) = body.get_mut(at % length) {
                    *place = *byte;
                }
            }
            read_body_as_all(&body);
            read_body_as_all(&body[..cut % (body.len() + 1)]);
        }
    }
}

fn body_of<M: Message>(message: &M) -> Vec<u8> {
    let mut body = Vec::new();
    message.encode(&mut body).unwrap();
    body
}

#[test]
fn each_defect_has_its_error() {
    let good = frame(&ToExecutor::SizeKv { blocks: 7 }, Epoch(1));
    let with = |at: usize, bytes: &[u8]| {
        let mut frame = good.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        decode::<ToExecutor>(&frame).unwrap_err()
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
        decode::<FromExecutor>(&good).unwrap_err(),
        FrameError::Body(CodecError::Kind(2)),
        "a message of the other direction"
    );
    let trailing = ToExecutor::decode(4, &[0]).unwrap_err();
    assert_eq!(trailing, CodecError::Trailing { kind: 4, left: 1 });
    let text = ToExecutor::decode(2, &[0x91, 0xa1, b'x']).unwrap_err().to_string();
    assert!(text.contains("message kind 2, 3 bytes, cannot be decoded"), "{text}");
}
