//! Frames of links between processes, and the bodies behind their checksums.

use protocol::codec::Message;
use protocol::frame::decode;
use protocol::{FromExecutor, FromNode, Handshake, ToExecutor, ToNode};

pub(crate) fn run(data: &[u8]) {
    one::<ToExecutor>(data);
    one::<FromExecutor>(data);
    one::<ToNode>(data);
    one::<FromNode>(data);
    one::<Handshake>(data);
}

/// As a frame, and as kind and body of one: chance finds no checksum.
fn one<M: Message>(data: &[u8]) {
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
