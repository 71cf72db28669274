//! Fuzz target: frames of the links between processes, and message bodies without a frame (and its checksum).

use protocol::codec::WireMessage;
use protocol::frame::decode;
use protocol::{ExecutorCommand, ExecutorEvent, NodeCommand, NodeEvent, NodeHandshake};

pub(crate) fn run(data: &[u8]) {
    check_message_type::<ExecutorCommand>(data);
    check_message_type::<ExecutorEvent>(data);
    check_message_type::<NodeCommand>(data);
    check_message_type::<NodeEvent>(data);
    check_message_type::<NodeHandshake>(data);
}

/// Decodes the data as a frame. Then also decodes it as a message type and a message body, because random
/// data is almost never a frame with a valid checksum.
fn check_message_type<M: WireMessage>(data: &[u8]) {
    if let Ok(Some(frame)) = decode::<M>(data) {
        assert!(frame.frame_bytes <= data.len());
    }
    let Some((&kind, body)) = data.split_first() else { return };
    let Ok(message) = M::decode(u16::from(kind), body) else { return };
    // A decoded message can be encoded, and the encoded message can be decoded.
    let mut written = Vec::new();
    message.encode(&mut written).unwrap();
    assert_eq!(message.kind(), u16::from(kind));
    assert!(M::decode(u16::from(kind), &written).is_ok());
}
