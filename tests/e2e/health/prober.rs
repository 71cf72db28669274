//! External prober that requests all probes repeatedly.

use crate::deadlines::{THREAD_TIMEOUT, wait_until};
use crate::http_client::connect_within;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Timeout of one probe request.
const PROBE_TIMEOUT: Duration = Duration::from_millis(200);
/// Pause between two rounds; a round requests every probe once.
const PAUSE: Duration = Duration::from_millis(10);

/// Results of one round, which requests every probe once.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProbeSample {
    pub(super) from: Instant,
    pub(super) to: Instant,
    pub(super) live: Option<u16>,
    pub(super) ready: Option<u16>,
    pub(super) health: Option<u16>,
}

/// Requests all probes of a server repeatedly until dropped.
pub(super) struct HealthProber {
    samples: Arc<Mutex<Vec<ProbeSample>>>,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl HealthProber {
    pub(super) fn start(at: SocketAddr) -> Self {
        let (samples, stopped) =
            (Arc::<Mutex<Vec<ProbeSample>>>::default(), Arc::new(AtomicBool::new(false)));
        let (to, stop) = (Arc::clone(&samples), Arc::clone(&stopped));
        let thread = std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let from = Instant::now();
                let [live, ready, health] = ["/livez", "/readyz", "/health"].map(|p| probe(at, p));
                let sample = ProbeSample { from, to: Instant::now(), live, ready, health };
                to.lock().unwrap().push(sample);
                std::thread::sleep(PAUSE);
            }
        });
        Self { samples, stopped, thread: Some(thread) }
    }

    /// Samples of rounds that started at `from` or later.
    pub(super) fn since(&self, from: Instant) -> Vec<ProbeSample> {
        self.samples.lock().unwrap().iter().filter(|sample| sample.from >= from).copied().collect()
    }
}

impl Drop for HealthProber {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, its message has been printed already.
            wait_until(THREAD_TIMEOUT, "the end of the prober", || thread.is_finished());
        }
    }
}

/// HTTP status of one probe; `None` if there is no reply.
fn probe(at: SocketAddr, path: &str) -> Option<u16> {
    let mut stream = connect_within(at, PROBE_TIMEOUT).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
    let mut head = [0; 12];
    stream.read_exact(&mut head).ok()?;
    std::str::from_utf8(&head[9..]).ok()?.parse().ok()
}
