//! Attacks by slow and half-closed connections, and by requests with invalid `Host` headers.

use super::target::AttackTarget;
use crate::rng::SimRng;
use std::net::Shutdown;
use std::time::Duration;

/// Number of connections that one attack opens.
const CONNECTIONS: u64 = 12;

/// Sends request headers byte by byte and stops before their end.
pub(super) fn slow_headers(target: &AttackTarget, rng: &mut SimRng) {
    let head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Long: ";
    let clients = (0..CONNECTIONS).map_while(|_| target.connect());
    let mut clients: Vec<_> = clients.collect();
    for byte in head.iter().take(10 + rng.below(30) as usize) {
        for client in &mut clients {
            let _ = client.send_raw(&[*byte]); // The server may have closed the connection.
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Starts to send bodies with an announced length and never completes them.
pub(super) fn slow_bodies(target: &AttackTarget, rng: &mut SimRng) {
    let length = rng.scaled(10, 8_000_000);
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{{\"prompt\": \""
    );
    let mut clients: Vec<_> = (0..CONNECTIONS).map_while(|_| target.connect()).collect();
    for client in &mut clients {
        let _ = client.send_raw(head.as_bytes()); // The server may have closed the connection.
    }
    for _ in 0..rng.below(10) {
        std::thread::sleep(Duration::from_millis(60));
        for client in &mut clients {
            let _ = client.send_raw(b"a");
        }
    }
}

/// Opens connections and leaves them idle, or shuts them down at any point of a request.
pub(super) fn half_open(target: &AttackTarget, rng: &mut SimRng) {
    let body = r#"{"prompt":"half","max_tokens":40,"ignore_eos":true,"stream":true}"#;
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        let Some(mut client) = target.connect() else { return };
        let end = rng.below(request.len() as u64 + 1) as usize;
        let _ = client.send_raw(&request.as_bytes()[..end]); // The server may have closed the connection.
        let how = rng.pick(&[Shutdown::Write, Shutdown::Read, Shutdown::Both]);
        if rng.chance_per_mille(700) {
            // This may fail if the connection is closed already.
            let _ = client.socket().shutdown(how);
        }
        clients.push(client);
    }
    std::thread::sleep(Duration::from_millis(200 + rng.below(300)));
}

/// Sends requests with known outputs and closes the sending half of the connections: the replies must be
/// complete.
pub(super) fn half_closed(target: &AttackTarget, rng: &mut SimRng) {
    for _ in 0..rng.between(1, 4) {
        let exchange = target.known.pick(rng);
        let Some(mut client) = target.connect() else { return };
        let sent = client.send_raw(&exchange.request());
        std::thread::sleep(Duration::from_millis(rng.below(3) * rng.below(100)));
        let closed = client.socket().shutdown(Shutdown::Write);
        // The server sends interim replies, whose status is 100, to detect disconnected clients.
        let reply = std::iter::repeat_with(|| client.read())
            .find(|reply| reply.as_ref().is_none_or(|reply| reply.status != 100));
        match reply.flatten() {
            Some(reply) => {
                target.check("half_closed", &reply);
                exchange.check(target, "half_closed", &reply);
            }
            None => target.add_violation(format!(
                "half_closed: no complete reply; sent: {sent:?}, closed: {closed:?}"
            )),
        }
    }
}

/// Heads whose `Host` headers are valid, so that a server must not reject them as `invalid_host`.
const VALID_HOSTS: &[&str] = &[
    "HTTP/1.1\r\nHost: x\r\n",
    "HTTP/1.1\r\nHost:\r\n",
    "HTTP/1.1\r\nHost: [::1]:8000\r\n",
    "HTTP/1.1\r\nhOsT: hadron.example:443\r\n",
    "HTTP/1.0\r\n",
    "HTTP/1.0\r\nHost: x\r\n",
];

/// Heads without a `Host` header, with two of them, or with a value that is not a host.
const INVALID_HOSTS: &[&str] = &[
    "HTTP/1.1\r\n",
    "HTTP/1.1\r\nX-Forwarded-Host: x\r\n",
    "HTTP/1.1\r\nHost: x\r\nHost: x\r\n",
    "HTTP/1.1\r\nHost: x\r\nhost: y\r\n",
    "HTTP/1.1\r\nHost:\r\nHost:\r\n",
    "HTTP/1.0\r\nHost: x\r\nHost: y\r\n",
    "HTTP/1.1\r\nHost: a b\r\n",
    "HTTP/1.1\r\nHost: user@x\r\n",
    "HTTP/1.1\r\nHost: x/v1/models\r\n",
];

/// Sends requests with no, one or two `Host` headers: the server must reject exactly the invalid heads, by name.
pub(super) fn host_headers(target: &AttackTarget, rng: &mut SimRng) {
    const KIND: &str = "host_headers";
    let body = r#"{"prompt":"host","max_tokens":2}"#;
    for _ in 0..CONNECTIONS {
        let is_valid = rng.chance_per_mille(300);
        let head = rng.pick(if is_valid { VALID_HOSTS } else { INVALID_HOSTS });
        let route =
            rng.pick(&["GET /version", "GET /metrics", "POST /v1/completions", "POST /nowhere"]);
        let request = format!(
            "{route} {head}Connection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let Some(mut client) = target.connect() else { return };
        // The server may reply and close the connection before it has read the body.
        let _ = client.send_raw(request.as_bytes());
        let Some(reply) = client.read() else {
            target.add_violation(format!("{KIND}: no reply to {route} {head:?}"));
            continue;
        };
        target.check(KIND, &reply);
        let is_named =
            reply.status == 400 && String::from_utf8_lossy(&reply.body).contains("invalid_host");
        if is_named == is_valid {
            target.add_violation(format!("{KIND}: {} on {route} {head:?}", reply.status));
        }
    }
}
