//! KV-event subscribers that never read: a libzmq socket and a bare TCP socket.

use crate::kv_event_replay::sequence_number;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use tokio::net::TcpSocket;
use zmq::{Context, Socket};

/// Size of the bare TCP subscriber's receive buffer: the smallest that the kernel permits.
const BUFFER_BYTES: u32 = 2_048;
/// ZMTP 3.0 greeting with the NULL mechanism: signature, version, mechanism, as-server flag, padding.
const GREETING: [u8; 64] = {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    let [n, u, l, ..] = *b"NULL";
    (greeting[12], greeting[13], greeting[14], greeting[15]) = (n, u, l, l);
    greeting
};
/// ZMTP READY command with the socket type SUB.
const READY: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB";
/// ZMTP message that subscribes to all topics.
const SUBSCRIBE: &[u8] = b"\x00\x01\x01";

/// A libzmq subscriber and a bare TCP subscriber that are connected and subscribed but not read.
pub(super) struct StuckSubscribers {
    library: Socket,
    bare: TcpStream,
}

impl StuckSubscribers {
    pub(super) fn connect(endpoint: &str) -> Self {
        let library = Context::new().socket(zmq::SUB).unwrap();
        library.set_rcvhwm(1).unwrap();
        library.set_rcvbuf(BUFFER_BYTES as i32).unwrap();
        library.set_subscribe(b"").unwrap();
        library.connect(endpoint).unwrap();
        let address = endpoint.strip_prefix("tcp://").unwrap().parse().unwrap();
        Self { library, bare: raw_subscriber(address) }
    }

    /// Checks that both subscribers received batches, and that the oldest unread batch of the libzmq
    /// subscriber is more than 100 batches older than batch `last_seq`, which shows that the subscriber has
    /// not read.
    pub(super) fn assert_missed_batches(mut self, last_seq: u64) {
        self.library.set_rcvtimeo(10_000).unwrap();
        let frames = self.library.recv_multipart(0).expect("a batch");
        let seq = sequence_number(&frames[1]);
        assert!(
            seq + 100 < last_seq,
            "got batch {seq} of {last_seq}: the subscriber has been reading"
        );
        self.bare.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut first = [0; 4_096];
        self.bare.read_exact(&mut first).expect("batches for the bare socket");
    }
}

fn raw_subscriber(address: SocketAddr) -> TcpStream {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().build().unwrap();
    let socket = runtime.block_on(async {
        let socket = TcpSocket::new_v4().unwrap();
        // The buffer size is set before connecting, because the TCP window is negotiated then.
        socket.set_recv_buffer_size(BUFFER_BYTES).unwrap();
        socket.connect(address).await.unwrap()
    });
    let mut socket = socket.into_std().unwrap();
    socket.set_nonblocking(false).unwrap();
    socket.write_all(&GREETING).unwrap();
    socket.write_all(READY).unwrap();
    // The subscription must not be sent before the publisher's READY command has arrived; otherwise the
    // publisher treats this peer as broken.
    let (mut greeting, mut head) = ([0; 64], [0; 2]);
    socket.read_exact(&mut greeting).unwrap();
    socket.read_exact(&mut head).unwrap();
    socket.read_exact(&mut vec![0; usize::from(head[1])]).unwrap();
    socket.write_all(SUBSCRIBE).unwrap();
    socket
}
