//! Tests of the HTTP client: replies that are split at every byte, error responses and stale connections.

use std::io::{BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use clap::Parser as _;
use serde_json::json;

use super::*;

/// Command line with the flags of the client only.
#[derive(clap::Parser)]
struct ClientTestArgs {
    #[command(flatten)]
    client: EvalClientArgs,
}

/// Starts a server that replies to every request with `parts`, written one by one. With `stale`, it closes
/// each connection after the first reply, without a `Connection: close` header. Returns its URL and the
/// number of accepted connections.
fn server(parts: Vec<Vec<u8>>, stale: bool) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1/", listener.local_addr().unwrap());
    let connections = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&connections);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            counter.fetch_add(1, Ordering::SeqCst);
            let parts = parts.clone();
            std::thread::spawn(move || {
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                while let Some(length) = request(&mut reader) {
                    reader.read_exact(&mut vec![0; length]).unwrap();
                    for part in &parts {
                        (&stream).write_all(part).unwrap();
                        (&stream).flush().unwrap();
                    }
                    if stale {
                        return;
                    }
                }
            });
        }
    });
    (url, connections)
}

/// Reads the head of one request and returns the length of its body.
fn request(reader: &mut impl std::io::BufRead) -> Option<usize> {
    let mut length = 0;
    for line in std::io::BufRead::lines(&mut *reader).map_while(Result::ok) {
        if line.is_empty() {
            return Some(length);
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length: ") {
            length = value.parse().unwrap();
        }
    }
    None
}

fn client(url: &str, timeout: &str) -> OpenAiClient {
    let args = ClientTestArgs::parse_from(["x", "--timeout", timeout, "--api-key", "k"]).client;
    OpenAiClient::new(url, &args, &ProcessEnvironment::default()).unwrap()
}

fn reply(status: u16, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

async fn events(url: &str) -> Result<Vec<String>, ClientError> {
    let client = client(url, "5s");
    let mut stream = client.post_stream("/v1/x", Bytes::from("{}")).await?;
    let mut texts = Vec::new();
    while let Some(event) = stream.next().await? {
        texts.push(String::from_utf8_lossy(event.data).into_owned());
    }
    Ok(texts)
}

#[tokio::test]
async fn sse_events_are_complete_at_any_chunking() {
    let body = ": keep-alive\n\ndata: {\"a\":1}\r\n\r\ndata:two\n\ndata: [DONE]\n\n";
    let bytes = reply(200, body);
    let head = bytes.len() - body.len();
    for cut in head..bytes.len() {
        let (url, _) = server(vec![bytes[..cut].to_vec(), bytes[cut..].to_vec()], false);
        assert_eq!(events(&url).await.unwrap(), ["{\"a\":1}", "two", "[DONE]"], "{cut}");
    }
}

#[tokio::test]
async fn truncated_stream_is_an_error() {
    let mut bytes = reply(200, "data: 1\n\ndata: 2\n\n");
    bytes.truncate(bytes.len() - 4);
    let (url, _) = server(vec![bytes], true);
    assert!(matches!(events(&url).await, Err(ClientError::Connection(_))));
}

#[tokio::test]
async fn error_responses_carry_status_and_message() {
    let (url, _) = server(vec![reply(400, r#"{"error":{"message":"bad top_k"}}"#)], false);
    let client = client(&url, "5s");
    let error = client.post("/v1/x", &json!({})).await.unwrap_err().to_string();
    assert_eq!(error, "status 400: bad top_k");
    let error = client.post_stream("/v1/x", Bytes::new()).await.unwrap_err().to_string();
    assert_eq!(error, "status 400: bad top_k");
    let error_reply = reply(400, r#"{"error":{"message":"below 0","param":"top_p"}}"#);
    let (url, _) = server(vec![error_reply], false);
    let error = self::client(&url, "5s").post("/v1/x", &json!({})).await.unwrap_err().to_string();
    assert_eq!(error, "status 400: below 0 (param: top_p)");
}

#[tokio::test]
async fn connections_are_reused_and_stale_ones_replaced() {
    for (stale, expected) in [(false, 1), (true, 3)] {
        let (url, connections) = server(vec![reply(200, "{}")], stale);
        let client = client(&url, "5s");
        for _ in 0..3 {
            assert_eq!(client.post("/v1/x", &json!({})).await.unwrap(), json!({}));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(connections.load(Ordering::SeqCst), expected, "{stale}");
    }
}

#[tokio::test]
async fn idle_response_times_out() {
    let (url, _) = server(vec![b"HTTP/1.1 200 X\r\ncontent-length: 9\r\n\r\n".to_vec()], false);
    let result = client(&url, "50ms").post("/v1/x", &json!({})).await;
    assert!(matches!(result, Err(ClientError::Timeout(_))));
}

#[test]
fn base_urls_are_parsed() {
    let client = client("http://host:81/base/v1/", "1s");
    assert_eq!((client.authority.as_str(), client.prefix.as_str()), ("host:81", "/base"));
    let args = ClientTestArgs::parse_from(["x"]).client;
    for bad in ["https://x", "x:80", "http://"] {
        assert!(OpenAiClient::new(bad, &args, &ProcessEnvironment::default()).is_err(), "{bad}");
    }
}
