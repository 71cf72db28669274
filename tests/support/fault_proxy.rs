//! A TCP proxy that injects link faults when a test requests them.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Fault that the proxy applies to all connections, open or new, from the time when the fault is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkFault {
    /// Bytes are forwarded unchanged.
    None,
    /// Each chunk (bytes of one read) is forwarded after a delay.
    Delay(Duration),
    /// No byte is forwarded, and no connection is closed.
    Stall,
    /// When the next chunk (bytes of one read) arrives, the connection is closed in both directions.
    Reset,
    /// When the next chunk (bytes of one read) arrives from the client or the server, the direction from the
    /// client to the server is closed; the opposite direction stays open.
    HalfClose,
    /// One bit of the next chunk (bytes of one read) to the server is flipped; later chunks are unchanged.
    Corrupt,
}

/// A TCP proxy that listens on a loopback port until it is dropped.
pub(crate) struct FaultProxy {
    pub(crate) address: SocketAddr,
    state: Arc<FaultProxyState>,
}

/// State that a proxy shares with the threads of its connections.
struct FaultProxyState {
    fault: Mutex<LinkFault>,
    stopped: AtomicBool,
    /// Number of chunks (bytes of one read) or connections that a fault has affected so far.
    affected: AtomicU64,
}

impl FaultProxyState {
    fn fault(&self) -> LinkFault {
        *self.fault.lock().unwrap()
    }

    /// Whether the current chunk must be corrupted. If so, clears the fault, so that later chunks are
    /// unchanged.
    fn takes_corruption(&self) -> bool {
        let mut fault = self.fault.lock().unwrap();
        let is_due = *fault == LinkFault::Corrupt;
        if is_due {
            *fault = LinkFault::None;
        }
        is_due
    }
}

impl FaultProxy {
    /// Starts a proxy that forwards connections to the address `server`. A process that listens on `server`
    /// may be started later.
    pub(crate) fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let fault = Mutex::new(LinkFault::None);
        let (stopped, affected) = (AtomicBool::new(false), AtomicU64::new(0));
        let state = Arc::new(FaultProxyState { fault, stopped, affected });
        let own = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if own.stopped.load(Ordering::Relaxed) {
                    return;
                }
                // If the server does not accept the connection, the proxy closes the client's connection.
                if let Ok(server) = TcpStream::connect(server) {
                    join(&client, &server, &own);
                }
            }
        });
        Self { address, state }
    }

    pub(crate) fn set(&self, fault: LinkFault) {
        *self.state.fault.lock().unwrap() = fault;
    }

    /// Returns the number of chunks (bytes of one read) or connections that a fault has affected so far.
    pub(crate) fn affected(&self) -> u64 {
        self.state.affected.load(Ordering::Relaxed)
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.set(LinkFault::Reset);
        self.state.stopped.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address); // Wakes the accept loop, which ends.
    }
}

fn join(client: &TcpStream, server: &TcpStream, state: &Arc<FaultProxyState>) {
    for stream in [client, server] {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    }
    let clones = || (client.try_clone().unwrap(), server.try_clone().unwrap());
    for to_server in [true, false] {
        let ((client, server), state) = (clones(), Arc::clone(state));
        std::thread::spawn(move || pump(&client, &server, to_server, &state));
    }
}

/// Forwards the bytes of one direction, and applies the current fault, until the connection ends.
fn pump(client: &TcpStream, server: &TcpStream, to_server: bool, state: &FaultProxyState) {
    let (mut from, mut to) = if to_server { (client, server) } else { (server, client) };
    let mut buffer = [0; 4_096];
    loop {
        if state.stopped.load(Ordering::Relaxed) {
            break;
        }
        let length = match from.read(&mut buffer) {
            Ok(0) => {
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
            Ok(length) => length,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(_) => break,
        };
        while state.fault() == LinkFault::Stall && !state.stopped.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let fault = state.fault();
        state.affected.fetch_add(u64::from(fault != LinkFault::None), Ordering::Relaxed);
        match fault {
            LinkFault::Reset => break,
            LinkFault::Delay(time) => std::thread::sleep(time),
            LinkFault::HalfClose => {
                // The server reads EOF from the client; its replies are still forwarded to the client.
                let _ = server.shutdown(Shutdown::Write);
                if to_server {
                    return;
                }
            }
            LinkFault::Corrupt if to_server && state.takes_corruption() => buffer[length / 2] ^= 4,
            LinkFault::None | LinkFault::Stall | LinkFault::Corrupt => {}
        }
        if to.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
}
