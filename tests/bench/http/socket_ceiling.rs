//! Throughput of two threads that exchange the same bytes as server and client over loopback sockets, but
//! without HTTP, text processing or scheduling: an upper bound for the throughput of the server.

use super::client::{self, StreamCounts};
use crate::deadlines::BoundedJoin as _;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};

/// Writes `events` events of `event_bytes` bytes on each of `streams` connections, `per_write` events at a
/// time, round-robin, and reads them with the client that also measures the server (`client.rs`).
pub(super) fn run(
    streams: usize,
    events: usize,
    event_bytes: usize,
    per_write: usize,
) -> StreamCounts {
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let mut sockets: Vec<_> = (0..streams).map(|_| listener.accept().unwrap().0).collect();
        let mut request = [0; 64];
        for socket in &mut sockets {
            socket.set_nodelay(true).unwrap();
            let _ = socket.read(&mut request).unwrap();
        }
        let mut event = vec![b'x'; event_bytes - 2];
        event.extend(b"\n\n");
        let chunk = event.repeat(per_write);
        for _ in 0..events / per_write {
            for socket in &mut sockets {
                socket.write_all(&chunk).unwrap();
            }
        }
        for socket in &mut sockets {
            socket.write_all(b"0\r\n\r\n").unwrap();
        }
    });
    let counts = client::run(address, "go", streams);
    server.join_bounded();
    counts
}
