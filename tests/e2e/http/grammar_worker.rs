//! Grammar worker processes that hang, exit or run out of time: they are killed and restarted, without effect
//! on other requests.

use super::executor_process::{children_as, send, wait_until};
use super::server_process::ServerProcess;
use crate::deadlines::BoundedJoin as _;
use crate::http_client::{HttpReply, get, post};
use crate::test_server::{SECRET_VARIABLE, ServerSetup, TestServer};
use grammar::serve_dry_runs;
use grammar::worker_process::WorkerProgram;
use serde_json::{Value, json};
use std::io::{Read, Write, stdin};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const PATH: &str = "/v1/completions";
/// Number of grammar worker processes, and so of concurrent dry runs: a dry run compiles an untrusted grammar
/// in a worker process to check its cost.
const COMPILE_THREADS: usize = 2;
/// Number of hanging grammars, several times the number of workers.
const ATTACKS: u32 = 5;
/// Maximum time until a grammar is rejected: the timeout of its test compilation in a worker process (0.9 s,
/// or 3 s for a worker without processor time) plus slack for a busy machine.
const REJECTED_WITHIN: Duration = Duration::from_secs(6);

/// Sends a request with a grammar that is distinct for each `number`, so that no cache contains it.
fn complete_with_grammar(address: SocketAddr, number: u32) -> HttpReply {
    let outputs = json!({ "regex": format!("{number}[ab]{{2}}") });
    let body = json!({"prompt": "x", "max_tokens": 9, "structured_outputs": outputs});
    post(address, PATH, &body)
}

fn complete_in_background(address: SocketAddr, number: u32) -> JoinHandle<(HttpReply, Duration)> {
    thread::spawn(move || {
        let since = Instant::now();
        (complete_with_grammar(address, number), since.elapsed())
    })
}

fn rejection(reply: &HttpReply) -> (u16, Value, String) {
    let error = reply.json()["error"].clone();
    (reply.status, error["reason"].clone(), error["message"].as_str().unwrap().to_owned())
}

/// Process ids of a server's grammar workers.
fn worker_pids(server: u32) -> Vec<u32> {
    children_as("grammar-worker", server)
}

/// Whether a process exists and is not a zombie.
fn exists(pid: u32) -> bool {
    state(pid).is_some_and(|state| state != 'Z')
}

fn send_all(pids: &[u32], signal: &str) {
    for pid in pids {
        send(*pid, signal);
    }
}

/// Stops processes and waits until all of their threads are stopped: SIGSTOP reaches one thread first, which
/// stops the others once it runs.
pub(super) fn stop(pids: &[u32]) {
    send_all(pids, "-STOP");
    wait_until(REJECTED_WITHIN, "they stand still", || {
        pids.iter().all(|pid| state(*pid) == Some('T'))
    });
}

/// Number of rejected grammars according to the server's metrics.
fn rejected_count(address: SocketAddr) -> u32 {
    counted(address, "hadron:grammar_compile_seconds_count", "\"error\"")
}

fn counted(address: SocketAddr, name: &str, label: &str) -> u32 {
    let page = String::from_utf8(get(address, "/metrics").body).unwrap();
    let line = page.lines().find(|line| line.starts_with(name) && line.contains(label));
    line.unwrap().rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u32
}

/// Starts a server and waits until all of its grammar workers run; returns their process ids.
fn server_with_workers() -> (ServerProcess, Vec<u32>) {
    let server = ServerProcess::start(&["--threads", "1"]);
    assert!(worker_pids(server.id()).is_empty(), "no request had a grammar");
    let mut number = 1_000;
    wait_until(Duration::from_secs(20), "a process for each lane", || {
        number += 2;
        let other = complete_in_background(server.address, number);
        assert_eq!(complete_with_grammar(server.address, number + 1).status, 200);
        assert_eq!(other.join_bounded().0.status, 200);
        worker_pids(server.id()).len() == COMPILE_THREADS
    });
    let workers = worker_pids(server.id());
    (server, workers)
}

#[test]
fn slow_grammar_worker_is_killed_and_replaced() {
    let (server, mut trials_now) = server_with_workers();
    for attack in 1..=ATTACKS {
        // Stopped workers get no processor time. The grammar is not at fault, so the rejection reports an
        // overload.
        stop(&trials_now);
        let (reply, took) = complete_in_background(server.address, attack).join_bounded();
        let (status, reason, message) = rejection(&reply);
        assert_eq!((status, reason.as_str()), (429, Some("grammars_overloaded")), "{message}");
        assert!(
            message.contains("the dry run of the grammar got 0 ms of processor time"),
            "{message}"
        );
        assert_eq!(reply.header("retry-after"), Some("10"));
        assert!(took < REJECTED_WITHIN, "{took:?}");
        let left = || trials_now.iter().filter(|pid| exists(**pid));
        wait_until(REJECTED_WITHIN, "the process is gone", || {
            left().count() == COMPILE_THREADS - 1
        });
        left().for_each(|pid| send(*pid, "-CONT"));
        wait_until(REJECTED_WITHIN, "another one", || {
            worker_pids(server.id()).len() == COMPILE_THREADS
        });
        assert_eq!(
            complete_with_grammar(server.address, 100 + attack).status,
            200,
            "after {attack} attacks"
        );
        trials_now = worker_pids(server.id());
    }
    assert_eq!(rejected_count(server.address), ATTACKS);
    let overloads = ("hadron:admission_rejections_total", "\"grammars_overloaded\"");
    assert_eq!(counted(server.address, overloads.0, overloads.1), ATTACKS);
}

/// Process state: `R` running, `S` sleeping, `Z` zombie; `None` if there is no such process.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

#[test]
fn endless_grammars_leave_no_running_process() {
    let (server, _) = server_with_workers();
    let address = server.address;
    // Most of these grammars would compile for many seconds; the remaining grammars exceed the work limit of
    // the parser before.
    let endless = |number: usize| {
        let regex = format!("{}({})*x{{1000}}", "b".repeat(number), "a?".repeat(2_000));
        json!({"prompt": "x", "max_tokens": 9, "structured_outputs": {"regex": regex}})
    };
    let attacks = (0..6).map(|number| thread::spawn(move || post(address, PATH, &endless(number))));
    for attack in attacks.collect::<Vec<_>>() {
        let (status, reason, message) = rejection(&attack.join_bounded());
        let told = (status, reason.as_str().unwrap());
        let starved =
            told == (429, "grammars_overloaded") && message.contains("the machine is overloaded");
        assert!(told == (400, "invalid_grammar") || starved, "{told:?}: {message}");
    }
    assert_eq!(complete_with_grammar(address, 1).status, 200);
    wait_until(REJECTED_WITHIN, "processes have nothing to do", || {
        let workers = worker_pids(server.id());
        workers.len() == COMPILE_THREADS && workers.into_iter().all(|pid| state(pid) == Some('S'))
    });
}

#[test]
fn grammar_worker_exit_loses_no_grammar() {
    let (server, trials_now) = server_with_workers();
    stop(&trials_now);
    let asked =
        [complete_in_background(server.address, 1), complete_in_background(server.address, 2)];
    // The workers must be compiling the grammars when they are killed; idle workers would just be replaced.
    thread::sleep(Duration::from_millis(100));
    send_all(&trials_now, "-KILL");
    for asked in asked {
        let reply = asked.join_bounded().0;
        assert_eq!(reply.status, 200, "{}", reply.json());
    }
    // If an idle worker exits, no grammar is lost, whether or not the server has detected the exit.
    send_all(&worker_pids(server.id()), "-KILL");
    assert_eq!(complete_with_grammar(server.address, 3).status, 200);
}

/// Starts a server that uses the test function `name` of this module as its grammar worker.
fn with_worker(name: &str) -> TestServer {
    let test = format!("http::grammar_worker::{name}");
    let args = ["--exact", &test, "--ignored"];
    let path = std::env::current_exe().unwrap();
    let program =
        WorkerProgram { path, args: args.map(Into::into).into(), secret_variable: SECRET_VARIABLE };
    TestServer::start(&ServerSetup { grammar_worker: program, ..ServerSetup::default() })
}

#[test]
fn grammar_that_crashes_two_workers_is_rejected() {
    let server = with_worker("crashing_worker_process");
    let reply = complete_with_grammar(server.address, 1);
    let (status, reason, message) = rejection(&reply);
    assert_eq!((status, reason.as_str()), (400, Some("invalid_grammar")), "{message}");
    assert!(message.contains("ended (signal: 6"), "{message}");
    assert_eq!(rejected_count(server.address), 1);
}

#[test]
fn endless_cpu_bound_grammar_is_rejected() {
    let server = with_worker("busy_worker_process");
    let (status, reason, message) = rejection(&complete_with_grammar(server.address, 1));
    assert_eq!((status, reason.as_str()), (400, Some("invalid_grammar")), "{message}");
    assert!(message.contains("longer than 900 ms"), "{message}");
    assert_eq!(rejected_count(server.address), 1);
}

#[test]
#[ignore = "worker process, started by grammar_that_crashes_two_workers_is_rejected"]
fn crashing_worker_process() {
    work_until_asked(|| std::process::abort());
}

#[test]
#[ignore = "worker process, started by endless_cpu_bound_grammar_is_rejected"]
fn busy_worker_process() {
    work_until_asked(|| {
        loop {
            std::hint::spin_loop();
        }
    });
}

/// Runs this process as a faulty grammar worker: reads the vocabulary, and calls `then`, which hangs or
/// exits, when the first grammar arrives.
fn work_until_asked(then: fn() -> !) {
    let server = UnixStream::from(stdin().as_fd().try_clone_to_owned().unwrap());
    let (inner, outer) = UnixStream::pair().unwrap();
    let (from, mut to) = (server.try_clone().unwrap(), outer.try_clone().unwrap());
    let is_ready = Arc::new(AtomicBool::new(false));
    let knows = Arc::clone(&is_ready);
    thread::spawn(move || {
        let (mut from, mut bytes) = (from, [0; 4096]);
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if knows.load(Ordering::SeqCst) {
                then();
            }
            to.write_all(&bytes[..count]).unwrap();
        }
        to.shutdown(Shutdown::Both).unwrap();
    });
    thread::spawn(move || {
        let (mut outer, mut server, mut byte) = (outer, server, [0]);
        while let Ok(1) = outer.read(&mut byte) {
            is_ready.store(true, Ordering::SeqCst);
            server.write_all(&byte).unwrap();
        }
    });
    serve_dry_runs(inner.into()).unwrap();
}

#[test]
fn grammar_workers_ignore_signals_and_exit_with_server() {
    let (mut server, trials_now) = server_with_workers();
    for signal in ["-INT", "-TERM"] {
        send_all(&trials_now, signal);
    }
    assert_eq!(
        [
            complete_with_grammar(server.address, 1).status,
            complete_with_grammar(server.address, 2).status
        ],
        [200, 200]
    );
    assert_eq!(worker_pids(server.id()), trials_now, "none has ended");
    stop(&trials_now[..1]); // A stopped worker cannot detect that its server has exited.
    server.signal("KILL");
    server.exits_within(Duration::from_secs(2));
    wait_until(REJECTED_WITHIN, "none is left", || !trials_now.iter().any(|pid| exists(*pid)));
}

#[test]
fn missing_grammar_worker_is_a_server_error() {
    let path = "/no/such/program".into();
    let program = WorkerProgram { path, args: Vec::new(), secret_variable: SECRET_VARIABLE };
    let server =
        TestServer::start(&ServerSetup { grammar_worker: program, ..ServerSetup::default() });
    for number in 0..2 {
        let reply = complete_with_grammar(server.address, number);
        let (status, reason, message) = rejection(&reply);
        assert_eq!((status, reason.as_str()), (503, Some("engine_unavailable")), "{message}");
        assert!(message.contains("cannot be started") && !message.contains("No such file"));
        assert!(reply.header("retry-after").is_some());
    }
    let plain = json!({"prompt": "x", "max_tokens": 9});
    assert_eq!(post(server.address, PATH, &plain).status, 200);
    assert_eq!(rejected_count(server.address), 0);
    server.wait_idle(Duration::from_secs(5));
}
