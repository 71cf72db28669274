//! A client with little overhead for SSE streams: one thread reads all streams, and counts events by the
//! blank lines that separate them.

use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Total numbers of events, reads and bytes of all streams, total duration, and median time to first token.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StreamCounts {
    pub(super) events: usize,
    pub(super) reads: usize,
    pub(super) bytes: usize,
    pub(super) elapsed: Duration,
    pub(super) first_p50: Duration,
}

/// Sends `request` on `streams` connections, and reads each connection until `[DONE]` or the end of the
/// connection.
pub(super) fn run(address: SocketAddr, request: &str, streams: usize) -> StreamCounts {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().build().unwrap();
    runtime.block_on(async {
        let mut sockets = Vec::new();
        for _ in 0..streams {
            sockets.push(TcpStream::connect(address).await.unwrap());
        }
        let start = Instant::now();
        let one = |mut socket: TcpStream| {
            let request = request.to_owned();
            tokio::spawn(async move {
                socket.write_all(request.as_bytes()).await.unwrap();
                read(socket, start).await
            })
        };
        let tasks: Vec<_> = sockets.into_iter().map(one).collect();
        let mut total = StreamCounts::default();
        let mut firsts = Vec::new();
        for task in tasks {
            let counts = task.await.unwrap();
            total.events += counts.events;
            total.reads += counts.reads;
            total.bytes += counts.bytes;
            firsts.push(counts.first_p50);
        }
        total.elapsed = start.elapsed();
        firsts.sort_unstable();
        total.first_p50 = firsts[firsts.len() / 2];
        total
    })
}

async fn read(mut socket: TcpStream, start: Instant) -> StreamCounts {
    let mut counts = StreamCounts::default();
    let mut buffer = vec![0_u8; 32 << 10];
    // The two line ends that separate events may arrive in different reads, so the last byte of the previous
    // read is kept.
    let mut last = 0;
    loop {
        let length = socket.read(&mut buffer).await.unwrap();
        let bytes = &buffer[..length];
        if counts.reads == 0 {
            counts.first_p50 = start.elapsed();
        }
        counts.reads += 1;
        counts.bytes += length;
        for &byte in bytes {
            counts.events += usize::from(byte == b'\n' && last == b'\n');
            last = byte;
        }
        let done = bytes.ends_with(b"0\r\n\r\n") || length == 0;
        if done {
            return counts;
        }
    }
}
