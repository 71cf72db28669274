//! Somebody outside who asks all probes, over and over.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A probe waits no longer for its answer.
const PROBE_TIMEOUT: Duration = Duration::from_millis(200);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(10);

/// What the probes said at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProbeSample {
    pub(super) from: Instant,
    pub(super) to: Instant,
    pub(super) live: Option<u16>,
    pub(super) ready: Option<u16>,
    pub(super) health: Option<u16>,
}

/// Looks at a server as long as it is kept.
pub(super) struct HealthProber {
    samples: Arc<Mutex<Vec<ProbeSample>>>,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl HealthProber {
    pub(super) fn start(at: SocketAddr) -> Self {
        let (looks, over) =
            (Arc::<Mutex<Vec<ProbeSample>>>::default(), Arc::new(AtomicBool::new(false)));
        let (to, stop) = (Arc::clone(&looks), Arc::clone(&over));
        let thread = std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let from = Instant::now();
                let [live, ready, health] = ["/livez", "/readyz", "/health"].map(|p| probe(at, p));
                let look = ProbeSample { from, to: Instant::now(), live, ready, health };
                to.lock().unwrap().push(look);
                std::thread::sleep(PAUSE);
            }
        });
        Self { samples: looks, stopped: over, thread: Some(thread) }
    }

    /// Looks that began at `from` or later.
    pub(super) fn since(&self, from: Instant) -> Vec<ProbeSample> {
        self.samples.lock().unwrap().iter().filter(|look| look.from >= from).copied().collect()
    }
}

impl Drop for HealthProber {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // Its panic is told already.
        }
    }
}

/// The status of a probe; `None` = there is no answer.
fn probe(at: SocketAddr, path: &str) -> Option<u16> {
    let mut stream = TcpStream::connect_timeout(&at, PROBE_TIMEOUT).ok()?;
    stream.set_read_timeout(Some(PROBE_TIMEOUT)).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
    let mut head = [0; 12];
    stream.read_exact(&mut head).ok()?;
    std::str::from_utf8(&head[9..]).ok()?.parse().ok()
}
