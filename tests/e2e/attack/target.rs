//! The server under attack, and everything that is noticed about it.

use crate::http::executor_process::children_as;
use crate::http::server_process::ServerProcess;
use crate::http_client::{HttpClient, HttpReply, get};
use std::net::{SocketAddr, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Faults that are kept; one of a kind is enough to fail.
const VIOLATIONS_KEPT: usize = 20;
/// Losses of executors in ten minutes: a server survives one more, which is left to a machine that starves an executor.
const EXECUTOR_FAILURES_MAX: usize = 2;
const EXECUTOR_FAILURE_WINDOW: Duration = Duration::from_mins(10);
/// A request or a connection is answered by then, on a busy machine as well.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_mins(1);

/// Addresses of a server and counters of a run.
pub(super) struct AttackTarget {
    pub(super) address: SocketAddr,
    /// Where KV events are published and replayed.
    pub(super) kv_events: SocketAddr,
    pub(super) kv_replay: SocketAddr,
    pub(super) pid: u32,
    pub(super) replies: AtomicU64,
    pub(super) rejected: AtomicU64,
    pub(super) probes: AtomicU64,
    pub(super) violations: Mutex<Vec<String>>,
    /// Odd while executors are away.
    outages: AtomicU64,
    executor_failures: Mutex<Vec<Instant>>,
    /// The executors that are known to serve.
    executors: Mutex<Vec<u32>>,
    /// Executors that were replaced though no attack took them away.
    pub(super) starved: AtomicU64,
}

impl AttackTarget {
    pub(super) fn new(process: &ServerProcess) -> Self {
        let source = get(process.address, "/kv_event_sources").json()["0"].clone();
        let port = |key: &str| {
            let text = source[key].as_str().unwrap_or_else(|| panic!("{source}"));
            let (_, port) = text.rsplit_once(':').unwrap();
            SocketAddr::from(([127, 0, 0, 1], port.parse().unwrap()))
        };
        Self {
            address: process.address,
            kv_events: port("endpoint"),
            kv_replay: port("replay_endpoint"),
            pid: process.id(),
            replies: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            probes: AtomicU64::new(0),
            violations: Mutex::default(),
            outages: AtomicU64::new(0),
            executor_failures: Mutex::default(),
            executors: Mutex::new(children_as("executor", process.id())),
            starved: AtomicU64::new(0),
        }
    }

    /// Notes what must not be.
    pub(super) fn add_violation(&self, what: String) {
        println!("fault: {what}");
        let mut faults = self.violations.lock().unwrap();
        if faults.len() < VIOLATIONS_KEPT {
            faults.push(what);
        }
    }

    /// Whether the process is there.
    pub(super) fn is_alive(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().next());
        state.is_some_and(|state| state != "Z")
    }

    /// A connection; `None` and a fault if the server takes none.
    pub(super) fn connect(&self) -> Option<HttpClient> {
        let connected = TcpStream::connect_timeout(&self.address, REPLY_TIMEOUT);
        match connected {
            Ok(stream) => {
                stream.set_nodelay(true).unwrap();
                stream.set_read_timeout(Some(REPLY_TIMEOUT)).unwrap();
                stream.set_write_timeout(Some(REPLY_TIMEOUT)).unwrap();
                Some(HttpClient { reader: std::io::BufReader::new(stream) })
            }
            Err(error) => {
                self.add_violation(format!("no connection: {error}"));
                // A server that is gone would be asked a million times.
                std::thread::sleep(Duration::from_millis(200));
                None
            }
        }
    }

    /// Sends a request on a connection of its own; every answer but 5xx will do, no answer at all will not.
    pub(super) fn post(&self, kind: &str, path: &str, body: &[u8]) -> Option<HttpReply> {
        let mut client = self.connect()?;
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n",
            body.len()
        );
        // The server may answer and close before it has read everything.
        let sent = client.send_raw(&[head.as_bytes(), body].concat());
        let reply = client.read();
        match &reply {
            Some(reply) => self.check(kind, reply),
            None if sent.is_ok() => self.add_violation(format!("{kind}: no answer on {path}")),
            None => {}
        }
        reply
    }

    /// Notes an answer of 5xx.
    pub(super) fn check(&self, kind: &str, reply: &HttpReply) {
        if reply.status >= 500 {
            let text: String = String::from_utf8_lossy(&reply.body).chars().take(300).collect();
            self.add_violation(format!("{kind}: {} {text}", reply.status));
        }
    }

    /// The number of the outage that lasts, or the number of outages so far; see [`AttackTarget::is_outage`].
    pub(super) fn outage(&self) -> u64 {
        self.outages.load(Ordering::SeqCst)
    }

    /// Whether executors are away at a time whose number [`AttackTarget::outage`] gave.
    pub(super) fn is_outage(number: u64) -> bool {
        number % 2 == 1
    }

    /// Has `lose` take executors away and wait for their successors, unless others do that, or the server would end
    /// because of too many losses.
    pub(super) fn with_executor_outage(&self, lose: impl FnOnce()) {
        let Ok(mut losses) = self.executor_failures.try_lock() else {
            std::thread::sleep(Duration::from_millis(50));
            return;
        };
        losses.retain(|at| at.elapsed() < EXECUTOR_FAILURE_WINDOW + Duration::from_secs(10));
        if losses.len() >= EXECUTOR_FAILURES_MAX {
            std::thread::sleep(Duration::from_millis(50));
            return;
        }
        losses.push(Instant::now());
        self.outages.fetch_add(1, Ordering::SeqCst);
        lose();
        *self.executors.lock().unwrap() = children_as("executor", self.pid);
        self.outages.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether the executors are others than before, or none, without an attack: on a machine that has no processor for
    /// them. Probes that say so are true.
    pub(super) fn executors_changed(&self) -> bool {
        let now = children_as("executor", self.pid);
        let mut known = self.executors.lock().unwrap();
        if now == *known {
            return false;
        }
        if !now.is_empty() {
            println!("executors {known:?} were replaced by {now:?}");
            self.starved.fetch_add(1, Ordering::Relaxed);
            *known = now;
        }
        true
    }
}
