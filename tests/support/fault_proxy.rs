//! A TCP proxy that breaks what passes through it, when told.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What happens to the bytes of all connections, from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkFault {
    /// They pass.
    None,
    /// Each piece passes later.
    Delay(Duration),
    /// Nothing passes, nothing is closed.
    Stall,
    /// Both directions end with the next piece.
    Reset,
    /// The way to the server ends with the next piece that passes in either direction, the way back goes on.
    HalfClose,
    /// One bit of the next piece to the server is another, of that one only.
    Corrupt,
}

/// Listens on a port of loopback that is given back at its end.
pub(crate) struct FaultProxy {
    pub(crate) address: SocketAddr,
    state: Arc<FaultProxyState>,
}

struct FaultProxyState {
    fault: Mutex<LinkFault>,
    stopped: AtomicBool,
    /// Pieces that have been broken, or connections.
    broken: AtomicU64,
}

impl FaultProxyState {
    fn fault(&self) -> LinkFault {
        *self.fault.lock().unwrap()
    }

    /// Whether this piece is the one to be changed.
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
    /// In front of `server`, which need not listen yet.
    pub(crate) fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let fault = Mutex::new(LinkFault::None);
        let (over, broken) = (AtomicBool::new(false), AtomicU64::new(0));
        let state = Arc::new(FaultProxyState { fault, stopped: over, broken });
        let own = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if own.stopped.load(Ordering::Relaxed) {
                    return;
                }
                // Whom nobody answers, is closed, as without a proxy.
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

    /// How many pieces or connections were broken so far.
    pub(crate) fn broken(&self) -> u64 {
        self.state.broken.load(Ordering::Relaxed)
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.set(LinkFault::Reset);
        self.state.stopped.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address); // Wakes the one who listens.
    }
}

fn join(client: &TcpStream, server: &TcpStream, state: &Arc<FaultProxyState>) {
    for stream in [client, server] {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    }
    let ends = || (client.try_clone().unwrap(), server.try_clone().unwrap());
    for to_server in [true, false] {
        let ((client, server), state) = (ends(), Arc::clone(state));
        std::thread::spawn(move || pump(&client, &server, to_server, &state));
    }
}

/// Passes one direction on until an end.
fn pump(client: &TcpStream, server: &TcpStream, to_server: bool, state: &FaultProxyState) {
    let (mut from, mut to) = if to_server { (client, server) } else { (server, client) };
    let mut piece = [0; 4_096];
    loop {
        if state.stopped.load(Ordering::Relaxed) {
            break;
        }
        let length = match from.read(&mut piece) {
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
        state.broken.fetch_add(u64::from(fault != LinkFault::None), Ordering::Relaxed);
        match fault {
            LinkFault::Reset => break,
            LinkFault::Delay(time) => std::thread::sleep(time),
            LinkFault::HalfClose => {
                // Its reader hears the end; what comes back still passes.
                let _ = server.shutdown(Shutdown::Write);
                if to_server {
                    return;
                }
            }
            LinkFault::Corrupt if to_server && state.takes_corruption() => piece[length / 2] ^= 4,
            LinkFault::None | LinkFault::Stall | LinkFault::Corrupt => {}
        }
        if to.write_all(&piece[..length]).is_err() {
            break;
        }
    }
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
}
