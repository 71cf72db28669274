//! A blocking HTTP/1.1 client for tests. Gives access to status, headers, body, chunks and events as
//! received.

#![allow(dead_code, reason = "each test binary uses a part")]

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Timeout of each connect, read and write.
const DEADLINE: Duration = Duration::from_secs(30);
/// Maximum time from a request to the end of its reply, also if bytes arrive all the time.
const REPLY_DEADLINE: Duration = Duration::from_mins(20);

/// A connection whose reads fail once the time since the last write exceeds a limit: a server that sends
/// bytes forever does not block a test.
#[derive(Debug)]
pub(crate) struct DeadlineSocket {
    stream: TcpStream,
    limit: Duration,
    written: Instant,
}

impl DeadlineSocket {
    fn new(stream: TcpStream, limit: Duration) -> Self {
        Self { stream, limit, written: Instant::now() }
    }
}

impl Read for DeadlineSocket {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let limit = self.limit;
        assert!(self.written.elapsed() < limit, "a reply did not end within {limit:?}");
        self.stream.read(buffer)
    }
}

impl Write for DeadlineSocket {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.written = Instant::now();
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
}

/// Connects to a server; each read and write of the socket has the timeout `limit`.
pub(crate) fn connect_within(address: SocketAddr, limit: Duration) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, limit)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    Ok(stream)
}

/// A complete HTTP reply.
#[derive(Debug, Clone)]
pub(crate) struct HttpReply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl HttpReply {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|_| panic!("not JSON: {}", String::from_utf8_lossy(&self.body)))
    }

    /// The `data:` events of a streamed reply; panics unless the last one is `[DONE]`.
    pub(crate) fn events(&self) -> Vec<Value> {
        let text = String::from_utf8(self.body.clone()).unwrap();
        let mut events: Vec<&str> = text
            .split("\n\n")
            .filter(|event| !event.is_empty() && !event.starts_with(':'))
            .map(|event| event.strip_prefix("data: ").unwrap())
            .collect();
        assert_eq!(events.pop(), Some("[DONE]"), "{text}");
        events.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

/// A client with one HTTP connection.
pub(crate) struct HttpClient {
    pub(crate) reader: BufReader<DeadlineSocket>,
}

impl HttpClient {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        Self::of(connect_within(address, DEADLINE).unwrap())
    }

    /// Creates the client of an open connection.
    pub(crate) fn of(stream: TcpStream) -> Self {
        Self { reader: BufReader::new(DeadlineSocket::new(stream, REPLY_DEADLINE)) }
    }

    /// Sets the timeout of each read. The deadline of a reply is at least as long.
    pub(crate) fn set_read_timeout(&mut self, limit: Duration) {
        let socket = self.reader.get_mut();
        socket.stream.set_read_timeout(Some(limit)).unwrap();
        socket.limit = socket.limit.max(limit);
    }

    /// The socket of the connection.
    pub(crate) fn socket(&self) -> &TcpStream {
        &self.reader.get_ref().stream
    }

    pub(crate) fn send_raw(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.reader.get_mut().write_all(bytes)
    }

    pub(crate) fn send(&mut self, method: &str, path: &str, headers: &str, body: &[u8]) {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {}\r\n\r\n",
            body.len()
        );
        self.send_raw(&[head.as_bytes(), body].concat()).unwrap();
    }

    /// Reads the status line and headers of a reply; `None` if the connection ends first.
    pub(crate) fn read_head(&mut self) -> Option<HttpReply> {
        let mut line = String::new();
        if self.reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let status = line.split(' ').nth(1).and_then(|s| s.parse().ok())?;
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            self.reader.read_line(&mut line).ok()?;
            let line = line.trim_end();
            if line.is_empty() {
                return Some(HttpReply { status, headers, body: Vec::new() });
            }
            let (name, value) = line.split_once(':')?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    /// Reads one chunk of a chunked body. The last chunk of a body is empty.
    pub(crate) fn read_chunk(&mut self) -> Option<Vec<u8>> {
        let mut line = String::new();
        if self.reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let length = usize::from_str_radix(line.trim_end(), 16).ok()?;
        let mut chunk = vec![0; length + 2];
        self.reader.read_exact(&mut chunk).ok()?;
        chunk.truncate(length);
        Some(chunk)
    }

    /// Reads a complete reply with its body; `None` if the connection ends first.
    pub(crate) fn read(&mut self) -> Option<HttpReply> {
        let mut reply = self.read_head()?;
        if reply.header("transfer-encoding") == Some("chunked") {
            loop {
                let chunk = self.read_chunk()?;
                if chunk.is_empty() {
                    return Some(reply);
                }
                reply.body.extend(chunk);
            }
        }
        let length = reply.header("content-length").map_or(0, |v| v.parse().unwrap());
        reply.body.resize(length, 0);
        self.reader.read_exact(&mut reply.body).ok()?;
        Some(reply)
    }

    pub(crate) fn post(&mut self, path: &str, body: &Value) -> HttpReply {
        let headers = "Content-Type: application/json\r\n";
        self.send("POST", path, headers, body.to_string().as_bytes());
        self.read().expect("a reply")
    }
}

/// Sends one POST request on a new connection.
pub(crate) fn post(address: SocketAddr, path: &str, body: &Value) -> HttpReply {
    HttpClient::connect(address).post(path, body)
}

/// Sends one GET request on a new connection.
pub(crate) fn get(address: SocketAddr, path: &str) -> HttpReply {
    let mut client = HttpClient::connect(address);
    client.send("GET", path, "", b"");
    client.read().expect("a reply")
}

#[test]
fn endless_replies_have_a_deadline() {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = connect_within(listener.local_addr().unwrap(), DEADLINE).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    std::thread::spawn(move || while server.write_all(b": alive\n").is_ok() {});
    let mut socket = DeadlineSocket::new(stream, Duration::from_millis(50));
    let read = || socket.read_to_end(&mut Vec::new());
    let panic = catch_unwind(AssertUnwindSafe(read)).unwrap_err();
    let text = panic.downcast_ref::<String>().unwrap();
    assert_eq!(text, "a reply did not end within 50ms");
}
