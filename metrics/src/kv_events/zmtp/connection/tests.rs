//! Tests of socket types and of messages that are sent in parts.

use super::*;

#[test]
fn the_socket_type_is_found_among_other_properties() {
    let router = b"\x08Identity\0\0\0\x02ab\x0bsocket-type\0\0\0\x06DEALER";
    assert_eq!(socket_type(router), Some(&b"DEALER"[..]));
    assert_eq!(socket_type(b""), None);
    assert_eq!(socket_type(b"\x0bSocket-Type\xff\xff\xff\xffSUB"), None);
    assert_eq!(socket_type(b"\xff"), None);
}

#[test]
fn an_outgoing_message_continues_at_any_offset() {
    let message = OutgoingMessage { head: b"head".to_vec(), payload: (*b"payload").into() };
    for offset in 0..=message.len() {
        let rest: Vec<u8> = message.from(offset).iter().flat_map(|s| s.to_vec()).collect();
        assert_eq!(rest, b"headpayload"[offset..]);
    }
}
