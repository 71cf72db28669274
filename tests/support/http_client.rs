//! A blocking HTTP/1.1 client for tests. Gives access to status, headers, body, chunks and events as
//! received.

#![allow(dead_code, reason = "each test binary uses a part")]

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Timeout of each connect, read and write.
const DEADLINE: Duration = Duration::from_secs(30);

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
    pub(crate) reader: BufReader<TcpStream>,
}

impl HttpClient {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect_timeout(&address, DEADLINE).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        Self { reader: BufReader::new(stream) }
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
