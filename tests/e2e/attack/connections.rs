//! Attacks by slow and half-closed connections.

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
            let _ = client.reader.get_mut().shutdown(how);
        }
        clients.push(client);
    }
    std::thread::sleep(Duration::from_millis(200 + rng.below(300)));
}
