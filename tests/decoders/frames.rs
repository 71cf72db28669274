//! Frames of links between processes, and the bodies behind their checksums.

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

/// As a frame, and as kind and body of one: chance finds no checksum.
fn check_message_type<M: WireMessage>(data: &[u8]) {
    if let Ok(Some((_, _, used))) = decode::<M>(data) {
        assert!(used <= data.len());
    }
    let Some((&kind, body)) = data.split_first() else { return };
    let Ok(message) = M::decode(u16::from(kind), body) else { return };
    // What can be read can be written, and read again.
    let mut written = Vec::new();
    message.encode(&mut written).unwrap();
    assert_eq!(message.kind(), u16::from(kind));
    assert!(M::decode(u16::from(kind), &written).is_ok());
}
