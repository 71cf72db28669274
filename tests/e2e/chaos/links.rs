//! Faults of links between clients and the server, and between nodes: bytes are delayed, stalled or
//! corrupted, and connections are reset or half-closed.

use super::body;
use crate::deadlines::BoundedJoin as _;
use crate::fault_proxy::{FaultProxy, LinkFault};
use crate::http::nodes::{ClusterAddress, NodeProcess, complete_on_replica};
use crate::http_client::{HttpClient, get, post};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::Value;
use server::ConnectionTimeouts;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_mins(1);

/// Applies a fault to a client's link while its stream runs: the output of this client may be truncated, but
/// other clients and the server's resources are not affected.
fn streams_through(fault: LinkFault) {
    let deadlines =
        ConnectionTimeouts { write: Duration::from_millis(600), ..ConnectionTimeouts::default() };
    let step_time = Duration::from_millis(2);
    let server = TestServer::start(&ServerSetup { step_time, deadlines, ..ServerSetup::default() });
    let asked = serde_json::json!({"prompt": [65, 66], "max_tokens": 300, "ignore_eos": true,
        "stream": true, "seed": 1});
    let whole: Value = {
        let mut asked = asked.clone();
        asked["stream"] = false.into();
        post(server.address, "/v1/completions", &asked).json()["choices"][0]["text"].clone()
    };
    let proxy = FaultProxy::start(server.address);
    let mut client = HttpClient::connect(proxy.address);
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
    // A client without the proxy is not affected by the fault.
    let mut other = asked.clone();
    other["stream"] = false.into();
    let reply = post(server.address, "/v1/completions", &other).json();
    assert_eq!(reply["choices"][0]["text"], whole, "{fault:?}");
    if fault == LinkFault::Stall {
        // The link is stalled for longer than the server's write timeout. The timeout expires if the socket
        // buffers cannot hold the rest of the stream.
        std::thread::sleep(Duration::from_secs(1));
        proxy.set(LinkFault::Reset);
    }
    let text = reader.join_bounded();
    assert!(proxy.affected() > 0, "{fault:?}");
    if matches!(fault, LinkFault::Delay(_)) {
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    }
    // However the stream ended, the server holds no blocks or sequence slots for it.
    server.wait_idle(TIMEOUT);
    assert_eq!(get(server.address, "/readyz").status, 200);
}

#[test]
fn client_link_faults_affect_only_their_own_stream() {
    let faults = [
        LinkFault::Delay(Duration::from_millis(3)),
        LinkFault::Stall,
        LinkFault::Reset,
        LinkFault::HalfClose,
    ];
    std::thread::scope(|scope| {
        for fault in faults {
            scope.spawn(move || streams_through(fault));
        }
    });
}

#[test]
fn corrupted_requests_are_rejected_or_harmless() {
    let server = TestServer::start(&ServerSetup::default());
    let proxy = FaultProxy::start(server.address);
    for words in 0..40 {
        let mut client = HttpClient::connect(proxy.address);
        proxy.set(LinkFault::Corrupt);
        // The proxy flips a bit in the middle of the request. The length of the request depends on `words`,
        // so that each request is corrupted at a different position.
        client.send("POST", "/v1/completions", "", body(words, 2, false).to_string().as_bytes());
        if let Some(reply) = client.read() {
            assert!(reply.status < 500, "{}", String::from_utf8_lossy(&reply.body));
        }
    }
    assert!(proxy.affected() >= 40);
    server.wait_idle(TIMEOUT);
}

#[test]
fn corrupt_or_stalled_node_link_loses_no_answer() {
    let real = ClusterAddress::new();
    let proxy = FaultProxy::start(real.address());
    let through = ClusterAddress::at(proxy.address);
    let (zero, mut one) = (NodeProcess::start(&real, 0, &[]), NodeProcess::start(&through, 1, &[]));
    let at = zero.address();
    let short = complete_on_replica(at, 1, 20);
    // A corrupted frame ends the link between the nodes; requests of node 1's replica then wait or move to
    // node 0.
    for fault in [LinkFault::Corrupt, LinkFault::Stall] {
        proxy.set(fault);
        if fault == LinkFault::Corrupt {
            assert_eq!(complete_on_replica(at, 1, 20), short, "the request waited or moved");
            proxy.set(LinkFault::None);
            assert_eq!(complete_on_replica(at, 0, 20), short);
            if one.has_ended() {
                one = NodeProcess::start(&through, 1, &[]);
            }
            assert_eq!(complete_on_replica(at, 1, 20), short, "once it is back");
        } else {
            zero.wait_for_log("no heartbeat for 5 s");
            assert_eq!(complete_on_replica(at, 0, 20), short, "node 0 still serves");
            assert_eq!(one.exits().code(), Some(3), "{}", one.log());
            proxy.set(LinkFault::None);
            let _again = NodeProcess::start(&through, 1, &[]);
            assert_eq!(complete_on_replica(at, 1, 20), short, "once it is back");
        }
    }
    for text in [zero.log(), one.log()] {
        assert!(!text.contains("panicked"), "{text}");
    }
}
