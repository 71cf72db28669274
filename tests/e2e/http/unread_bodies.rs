//! Replies to requests whose body no handler reads: the connection stays usable, or the reply says that it closes.

use crate::http_client::HttpClient;
use crate::test_server::{ServerSetup, TestServer};
use server::{ApiKeys, ServerOptions};
use std::time::{Duration, Instant};

/// Time from a request head to its body, as with a client that writes them separately.
const BODY_DELAY: Duration = Duration::from_millis(50);

fn server_with_key() -> TestServer {
    let options =
        ServerOptions { api_keys: ApiKeys::new(["one"], ["root"]), ..ServerOptions::default() };
    TestServer::start(&ServerSetup { options, ..ServerSetup::default() })
}

fn head(method: &str, path: &str, key: &str, more: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{more}\r\n")
}

/// Checks that a further request on the connection of `client` is answered.
fn check_reuse(client: &mut HttpClient, what: &str) {
    client.send_raw(head("GET", "/v1/models", "one", "").as_bytes()).unwrap();
    let reply = client.read().unwrap_or_else(|| panic!("{what}: the connection was closed"));
    assert_eq!(reply.status, 200, "{what}");
}

#[test]
fn connections_stay_open_after_replies_without_the_body() {
    let server = server_with_key();
    for (method, path, key, status) in [
        ("POST", "/v1/completions", "wrong", 401),
        ("POST", "/v1/embeddings", "one", 400),
        ("POST", "/nowhere", "one", 404),
        ("PUT", "/v1/models", "one", 405),
    ] {
        let body = vec![b' '; 70_000];
        for length in [2, body.len()] {
            let mut client = HttpClient::connect(server.address);
            let length_field = format!("Content-Length: {length}\r\n");
            client.send_raw(head(method, path, key, &length_field).as_bytes()).unwrap();
            std::thread::sleep(BODY_DELAY);
            client.send_raw(&body[..length]).unwrap();
            let reply = client.read().unwrap();
            assert_eq!((reply.status, reply.header("connection")), (status, None), "{path}");
            check_reuse(&mut client, path);
        }
    }
}

#[test]
fn connections_close_after_bodies_that_are_not_awaited() {
    let server = server_with_key();
    let long = format!("Content-Length: {}\r\n", 100 << 20);
    let waiting = "Content-Length: 2\r\nExpect: 100-continue\r\n";
    let slow = "Content-Length: 2\r\n";
    for more in [&long, waiting, slow] {
        let mut client = HttpClient::connect(server.address);
        let begin = Instant::now();
        client.send_raw(head("POST", "/v1/completions", "wrong", more).as_bytes()).unwrap();
        if *more == long {
            // The reply arrives although the client has sent a part of the body, which no handler reads.
            client.send_raw(&vec![b' '; 20 << 20]).unwrap();
        }
        let reply = client.read().unwrap_or_else(|| panic!("{more}: no reply"));
        assert_eq!((reply.status, reply.header("connection")), (401, Some("close")), "{more}");
        assert!(begin.elapsed() < Duration::from_secs(10), "{more}");
        assert!(client.read().is_none(), "{more}: the connection is open");
    }
}
