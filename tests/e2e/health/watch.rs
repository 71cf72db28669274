//! Somebody outside who asks all probes, over and over.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A probe waits no longer for its answer.
const PATIENCE: Duration = Duration::from_millis(200);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(10);

/// What the probes said at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    pub(super) from: Instant,
    pub(super) to: Instant,
    pub(super) live: Option<u16>,
    pub(super) ready: Option<u16>,
    pub(super) health: Option<u16>,
}

/// Looks at a server as long as it is kept.
pub(super) struct Watch {
    looks: Arc<Mutex<Vec<Look>>>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(super) fn start(at: SocketAddr) -> Self {
        let (looks, over) = (Arc::<Mutex<Vec<Look>>>::default(), Arc::new(AtomicBool::new(false)));
        let (to, stop) = (Arc::clone(&looks), Arc::clone(&over));
        let thread = std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let from = Instant::now();
                let [live, ready, health] = ["/livez", "/readyz", "/health"].map(|p| ask(at, p));
                let look = Look { from, to: Instant::now(), live, ready, health };
                to.lock().unwrap().push(look);
                std::thread::sleep(PAUSE);
            }
        });
        Self { looks, over, thread: Some(thread) }
    }

    /// Looks that began at `from` or later.
    pub(super) fn since(&self, from: Instant) -> Vec<Look> {
        self.looks.lock().unwrap().iter().filter(|look| look.from >= from).copied().collect()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // Its panic is told already.
        }
    }
}

/// The status of a probe; `None` = there is no answer.
fn ask(at: SocketAddr, path: &str) -> Option<u16> {
    let mut stream = TcpStream::connect_timeout(&at, PATIENCE).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
    let mut head = [0; 12];
    stream.read_exact(&mut head).ok()?;
    std::str::from_utf8(&head[9..]).ok()?.parse().ok()
}
