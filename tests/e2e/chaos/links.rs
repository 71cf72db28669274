//! Links between clients and the server, and between nodes, that delay, stall, cut, close one way, or change a bit.

use super::body;
use crate::fault_proxy::{Fault, FaultProxy};
use crate::http::nodes::{Node, Place, answer_of};
use crate::http_client::{Client, get, post};
use crate::http_host::{Server, Setup};
use hadron::server::connection::Deadlines;
use serde_json::Value;
use std::time::Duration;

const SOON: Duration = Duration::from_mins(1);

/// What each fault does to a stream that is under way.
fn streams_through(fault: Fault) {
    let deadlines = Deadlines { write: Duration::from_millis(600), ..Deadlines::default() };
    let step_time = Duration::from_millis(2);
    let server = Server::start(&Setup { step_time, deadlines, ..Setup::default() });
    let asked = serde_json::json!({"prompt": [65, 66], "max_tokens": 300, "ignore_eos": true,
        "stream": true, "seed": 1});
    let whole: Value = {
        let mut asked = asked.clone();
        asked["stream"] = false.into();
        post(server.address, "/v1/completions", &asked).json()["choices"][0]["text"].clone()
    };
    let proxy = FaultProxy::start(server.address);
    let mut client = Client::connect(proxy.address);
    client.send("POST", "/v1/completions", "", asked.to_string().as_bytes());
    assert_eq!(client.read_head().unwrap().status, 200);
    let mut seen = client.read_chunk().unwrap();
    proxy.set(fault);
    let reader = std::thread::spawn(move || {
        while let Some(chunk) = client.read_chunk().filter(|chunk| !chunk.is_empty()) {
            seen.extend(chunk);
        }
        String::from_utf8_lossy(&seen).into_owned()
    });
    // Others notice nothing.
    let mut other = asked.clone();
    other["stream"] = false.into();
    let reply = post(server.address, "/v1/completions", &other).json();
    assert_eq!(reply["choices"][0]["text"], whole, "{fault:?}");
    if fault == Fault::Stall {
        // Longer than a writer is waited for, should the sockets between hold little.
        std::thread::sleep(Duration::from_secs(1));
        proxy.set(Fault::Cut);
    }
    let text = reader.join().unwrap();
    assert!(proxy.broken() > 0, "{fault:?}");
    if matches!(fault, Fault::Delay(_)) {
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    }
    // However it ended, nothing of it is left.
    server.wait_idle(SOON);
    assert_eq!(get(server.address, "/readyz").status, 200);
}

#[test]
fn faults_between_client_and_server_harm_their_own_stream_only() {
    let faults =
        [Fault::Delay(Duration::from_millis(3)), Fault::Stall, Fault::Cut, Fault::HalfClose];
    std::thread::scope(|scope| {
        for fault in faults {
            scope.spawn(move || streams_through(fault));
        }
    });
}

#[test]
fn changed_bits_of_requests_are_refused_or_harmless() {
    let server = Server::start(&Setup::default());
    let proxy = FaultProxy::start(server.address);
    for words in 0..40 {
        let mut client = Client::connect(proxy.address);
        proxy.set(Fault::Corrupt);
        // The changed bit is in another place each time: the middle of what is sent.
        client.send("POST", "/v1/completions", "", body(words, 2, false).to_string().as_bytes());
        if let Some(reply) = client.read() {
            assert!(reply.status < 500, "{}", String::from_utf8_lossy(&reply.body));
        }
    }
    assert!(proxy.broken() >= 40);
    server.wait_idle(SOON);
}

#[test]
fn a_link_between_nodes_that_lies_or_stalls_loses_no_answer() {
    let real = Place::new();
    let proxy = FaultProxy::start(real.address());
    let through = Place::at(proxy.address);
    let (zero, mut one) = (Node::start(&real, 0, &[]), Node::start(&through, 1, &[]));
    let at = zero.address();
    let short = answer_of(at, 1, 20);
    // A frame that is not what was sent ends the link it came on, with everything that depends on it.
    for fault in [Fault::Corrupt, Fault::Stall] {
        proxy.set(fault);
        if fault == Fault::Corrupt {
            assert_eq!(answer_of(at, 1, 20), short, "the request waited or moved");
            proxy.set(Fault::None);
            assert_eq!(answer_of(at, 0, 20), short);
            if one.has_ended() {
                one = Node::start(&through, 1, &[]);
            }
            assert_eq!(answer_of(at, 1, 20), short, "once it is back");
        } else {
            zero.says("no sign of life for 5 s");
            assert_eq!(answer_of(at, 0, 20), short, "node 0 serves on");
            assert_eq!(one.exits().code(), Some(3), "{}", one.said());
            proxy.set(Fault::None);
            let _again = Node::start(&through, 1, &[]);
            assert_eq!(answer_of(at, 1, 20), short, "once it is back");
        }
    }
    for said in [zero.said(), one.said()] {
        assert!(!said.contains("panicked"), "{said}");
    }
}
