//! The server under attack, and all recorded violations.

use super::bystander::RecordedExchanges;
use super::model_folder::ServedModelFolder;
use crate::http::executor_process::children_as;
use crate::http::server_process::ServerProcess;
use crate::http_client::{HttpClient, HttpReply, connect_within, get};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Maximum number of stored violations; one is enough to fail a run.
const VIOLATIONS_KEPT: usize = 20;
/// Maximum number of executor failures in `EXECUTOR_FAILURE_WINDOW` that attacks may cause. A server survives
/// one more failure, which is reserved for an executor that gets too little processor time.
const EXECUTOR_FAILURES_MAX: usize = 2;
const EXECUTOR_FAILURE_WINDOW: Duration = Duration::from_mins(10);
/// Timeout of a request or connection, also on a busy machine.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_mins(1);

/// Addresses of the attacked server, and the counters and violations of a run.
pub(super) struct AttackTarget {
    pub(super) address: SocketAddr,
    /// Address of the KV-event publisher.
    pub(super) kv_events: SocketAddr,
    /// Address of the replay socket of the KV-event publisher.
    pub(super) kv_replay: SocketAddr,
    pub(super) pid: u32,
    pub(super) model: ServedModelFolder,
    /// Requests with the text of their replies before the attacks.
    pub(super) known: RecordedExchanges,
    pub(super) replies: AtomicU64,
    pub(super) rejected: AtomicU64,
    pub(super) probes: AtomicU64,
    pub(super) violations: Mutex<Vec<String>>,
    /// Twice the number of completed executor outages, plus 1 during an outage: equal values before and after
    /// a probe mean that no outage began or ended meanwhile.
    outages: AtomicU64,
    executor_failures: Mutex<Vec<Instant>>,
    /// Number of executor outages by the name of the attack that caused them.
    pub(super) outage_causes: Mutex<BTreeMap<&'static str, u64>>,
    /// Process ids of the executors as last seen. If they change without an attack, the server has replaced
    /// an executor that got too little processor time.
    executors: Mutex<Vec<u32>>,
    /// Number of executors that were replaced without an attack.
    pub(super) starved: AtomicU64,
}

impl AttackTarget {
    pub(super) fn new(process: &ServerProcess, model: ServedModelFolder) -> Self {
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
            model,
            known: RecordedExchanges::learn(process.address),
            replies: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            probes: AtomicU64::new(0),
            violations: Mutex::default(),
            outages: AtomicU64::new(0),
            executor_failures: Mutex::default(),
            outage_causes: Mutex::default(),
            executors: Mutex::new(children_as("executor", process.id())),
            starved: AtomicU64::new(0),
        }
    }

    /// Records a violation, which fails the run.
    pub(super) fn add_violation(&self, what: String) {
        println!("fault: {what}");
        let mut faults = self.violations.lock().unwrap();
        if faults.len() < VIOLATIONS_KEPT {
            faults.push(what);
        }
    }

    /// Whether the server process is running.
    pub(super) fn is_alive(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().next());
        state.is_some_and(|state| state != "Z")
    }

    /// Opens a connection; if the server does not accept it, records a violation and returns `None`.
    pub(super) fn connect(&self) -> Option<HttpClient> {
        match connect_within(self.address, REPLY_TIMEOUT) {
            Ok(stream) => Some(HttpClient::of(stream)),
            Err(error) => {
                self.add_violation(format!("no connection: {error}"));
                // If the server has exited, the pause limits the number of attempts.
                std::thread::sleep(Duration::from_millis(200));
                None
            }
        }
    }

    /// Sends a request on a new connection. Any status but 5xx is accepted; a missing reply is a violation.
    pub(super) fn post(&self, kind: &str, path: &str, body: &[u8]) -> Option<HttpReply> {
        let mut client = self.connect()?;
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n",
            body.len()
        );
        // The server may reply and close the connection before it has read the whole request.
        let sent = client.send_raw(&[head.as_bytes(), body].concat());
        let reply = client.read();
        match &reply {
            Some(reply) => self.check(kind, reply),
            None if sent.is_ok() => self.add_violation(format!("{kind}: no reply on {path}")),
            None => {}
        }
        reply
    }

    /// Records a violation if the reply has a 5xx status.
    pub(super) fn check(&self, kind: &str, reply: &HttpReply) {
        if reply.status >= 500 {
            let text: String = String::from_utf8_lossy(&reply.body).chars().take(300).collect();
            self.add_violation(format!("{kind}: {} {text}", reply.status));
        }
    }

    /// Twice the number of completed executor outages, plus 1 during an outage; see
    /// [`AttackTarget::is_outage`].
    pub(super) fn outage(&self) -> u64 {
        self.outages.load(Ordering::SeqCst)
    }

    /// Whether `number`, a result of [`AttackTarget::outage`], was read during an executor outage.
    pub(super) fn is_outage(number: u64) -> bool {
        number % 2 == 1
    }

    /// Runs `fail_executors`, which ends executors and waits for their replacements, after other attacks that
    /// end executors. Does nothing if the server would exit because of too many failures. `cause` is the name of
    /// the attack.
    pub(super) fn with_executor_outage(&self, cause: &'static str, fail_executors: impl FnOnce()) {
        let mut losses = self.executor_failures.lock().unwrap();
        losses.retain(|at| at.elapsed() < EXECUTOR_FAILURE_WINDOW + Duration::from_secs(10));
        if losses.len() >= EXECUTOR_FAILURES_MAX {
            drop(losses);
            std::thread::sleep(Duration::from_millis(50));
            return;
        }
        losses.push(Instant::now());
        *self.outage_causes.lock().unwrap().entry(cause).or_default() += 1;
        self.outages.fetch_add(1, Ordering::SeqCst);
        fail_executors();
        *self.executors.lock().unwrap() = children_as("executor", self.pid);
        self.outages.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether executors have changed or are missing without an attack, because they got too little processor
    /// time. Probes that report unready are then correct.
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
