//! The processes that try grammars: what is killed, what is started again, and what nobody notices.

use super::executor_process::{children_as, send, within};
use super::process::Process;
use crate::http_client::{Reply, get, post};
use crate::http_host::{Server, Setup};
use hadron::grammar::serve_trials;
use hadron::worker_process::WorkerProgram;
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
/// Grammars tried at a time.
const LANES: usize = 2;
/// More grammars than are tried at a time, several times over.
const ATTACKS: u32 = 5;
/// A wall of 0.9 s, or of 3 s for who got no processor, on a machine that does much else.
const REFUSED_WITHIN: Duration = Duration::from_secs(6);

/// A grammar that no other call of it shares.
fn ask(address: SocketAddr, number: u32) -> Reply {
    let outputs = json!({ "regex": format!("{number}[ab]{{2}}") });
    let body = json!({"prompt": "x", "max_tokens": 9, "structured_outputs": outputs});
    post(address, PATH, &body)
}

fn ask_aside(address: SocketAddr, number: u32) -> JoinHandle<(Reply, Duration)> {
    thread::spawn(move || {
        let since = Instant::now();
        (ask(address, number), since.elapsed())
    })
}

fn refusal(reply: &Reply) -> (u16, Value, String) {
    let error = reply.json()["error"].clone();
    (reply.status, error["reason"].clone(), error["message"].as_str().unwrap().to_owned())
}

/// The processes of a server that try grammars.
fn trials(server: u32) -> Vec<u32> {
    children_as("grammar-worker", server)
}

/// Whether it runs, or could: one that waits to be collected does not.
fn exists(pid: u32) -> bool {
    state(pid).is_some_and(|state| state != 'Z')
}

fn send_all(pids: &[u32], signal: &str) {
    for pid in pids {
        send(*pid, signal);
    }
}

/// Stops them, and waits for it: a signal reaches one thread, which stops the others once it runs.
pub(super) fn stop(pids: &[u32]) {
    send_all(pids, "-STOP");
    within(REFUSED_WITHIN, "they stand still", || pids.iter().all(|pid| state(*pid) == Some('T')));
}

/// Refused so far, by the server's own count.
fn refused(address: SocketAddr) -> u32 {
    counted(address, "hadron:grammar_compile_seconds_count", "\"error\"")
}

fn counted(address: SocketAddr, name: &str, label: &str) -> u32 {
    let page = String::from_utf8(get(address, "/metrics").body).unwrap();
    let line = page.lines().find(|line| line.starts_with(name) && line.contains(label));
    line.unwrap().rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u32
}

/// A server whose lanes all have their process.
fn warm() -> (Process, Vec<u32>) {
    let server = Process::start(&["--threads", "1"]);
    assert!(trials(server.id()).is_empty(), "nobody has sent a grammar");
    let mut number = 1_000;
    within(Duration::from_secs(20), "a process for each lane", || {
        number += 2;
        let other = ask_aside(server.address, number);
        assert_eq!(ask(server.address, number + 1).status, 200);
        assert_eq!(other.join().unwrap().0.status, 200);
        trials(server.id()).len() == LANES
    });
    let trials = trials(server.id());
    (server, trials)
}

#[test]
fn a_process_that_takes_too_long_is_killed_and_the_next_grammar_has_another() {
    let (server, mut trials_now) = warm();
    for attack in 1..=ATTACKS {
        // Whatever they work on, they will never be done, which is no fault of the grammar.
        stop(&trials_now);
        let (reply, took) = ask_aside(server.address, attack).join().unwrap();
        let (status, reason, message) = refusal(&reply);
        assert_eq!((status, reason.as_str()), (429, Some("grammars_overloaded")), "{message}");
        assert!(message.contains("the grammar had a processor for 0 ms"), "{message}");
        assert_eq!(reply.header("retry-after"), Some("10"));
        assert!(took < REFUSED_WITHIN, "{took:?}");
        let left = || trials_now.iter().filter(|pid| exists(**pid));
        within(REFUSED_WITHIN, "the process is gone", || left().count() == LANES - 1);
        left().for_each(|pid| send(*pid, "-CONT"));
        within(REFUSED_WITHIN, "another one", || trials(server.id()).len() == LANES);
        assert_eq!(ask(server.address, 100 + attack).status, 200, "after {attack} attacks");
        trials_now = trials(server.id());
    }
    assert_eq!(refused(server.address), ATTACKS);
    let overloads = ("hadron:admission_rejections_total", "\"grammars_overloaded\"");
    assert_eq!(counted(server.address, overloads.0, overloads.1), ATTACKS);
}

/// `R` runs, `S` sleeps, `Z` waits to be collected; nothing if there is no such process.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

#[test]
fn grammars_that_compile_for_ever_leave_nothing_that_runs_on() {
    let (server, _) = warm();
    let address = server.address;
    // Most of them would compile for many seconds; what fails sooner has used up its fuel.
    let endless = |number: usize| {
        let regex = format!("{}({})*x{{1000}}", "b".repeat(number), "a?".repeat(2_000));
        json!({"prompt": "x", "max_tokens": 9, "structured_outputs": {"regex": regex}})
    };
    let attacks = (0..6).map(|number| thread::spawn(move || post(address, PATH, &endless(number))));
    for attack in attacks.collect::<Vec<_>>() {
        let (status, reason, message) = refusal(&attack.join().unwrap());
        let told = (status, reason.as_str().unwrap());
        let starved = told == (429, "grammars_overloaded") && message.contains("none to spare");
        assert!(told == (400, "invalid_grammar") || starved, "{told:?}: {message}");
    }
    assert_eq!(ask(address, 1).status, 200);
    within(REFUSED_WITHIN, "processes have nothing to do", || {
        let trials = trials(server.id());
        trials.len() == LANES && trials.into_iter().all(|pid| state(pid) == Some('S'))
    });
}

#[test]
fn a_process_that_dies_takes_no_grammar_along() {
    let (server, trials_now) = warm();
    stop(&trials_now);
    let asked = [ask_aside(server.address, 1), ask_aside(server.address, 2)];
    thread::sleep(Duration::from_millis(100)); // Should they not be asked yet, another one is started for them.
    send_all(&trials_now, "-KILL");
    for asked in asked {
        let reply = asked.join().unwrap().0;
        assert_eq!(reply.status, 200, "{}", reply.json());
    }
    // Nor does one that idles, whether or not its end has been noticed.
    send_all(&trials(server.id()), "-KILL");
    assert_eq!(ask(server.address, 3).status, 200);
}

/// A server whose grammars are tried by one of the tests below.
fn with_worker(name: &str) -> Server {
    let test = format!("http::grammar_process::{name}");
    let args = ["--exact", &test, "--ignored"];
    let path = std::env::current_exe().unwrap();
    let program = WorkerProgram { path, args: args.map(Into::into).into() };
    Server::start(&Setup { trials: program, ..Setup::default() })
}

#[test]
fn a_grammar_that_breaks_two_processes_is_refused() {
    let server = with_worker("the_broken_worker");
    let reply = ask(server.address, 1);
    let (status, reason, message) = refusal(&reply);
    assert_eq!((status, reason.as_str()), (400, Some("invalid_grammar")), "{message}");
    assert!(message.contains("ended (signal: 6"), "{message}");
    assert_eq!(refused(server.address), 1);
}

#[test]
fn a_grammar_that_takes_the_processor_and_is_never_done_is_refused() {
    let server = with_worker("the_busy_worker");
    let (status, reason, message) = refusal(&ask(server.address, 1));
    assert_eq!((status, reason.as_str()), (400, Some("invalid_grammar")), "{message}");
    assert!(message.contains("longer than 900 ms"), "{message}");
    assert_eq!(refused(server.address), 1);
}

#[test]
#[ignore = "started by a test above"]
fn the_broken_worker() {
    work_until_asked(|| std::process::abort());
}

#[test]
#[ignore = "started by a test above"]
fn the_busy_worker() {
    work_until_asked(|| {
        loop {
            std::hint::spin_loop();
        }
    });
}

/// Learns the vocabulary, and does this with the first grammar.
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
    serve_trials(inner.into()).unwrap();
}

#[test]
fn processes_leave_signals_to_the_server_and_do_not_outlive_it() {
    let (mut server, trials_now) = warm();
    for signal in ["-INT", "-TERM"] {
        send_all(&trials_now, signal);
    }
    assert_eq!([ask(server.address, 1).status, ask(server.address, 2).status], [200, 200]);
    assert_eq!(trials(server.id()), trials_now, "none has ended");
    stop(&trials_now[..1]); // It cannot notice by itself.
    server.signal("KILL");
    server.exits_within(Duration::from_secs(2));
    within(REFUSED_WITHIN, "none is left", || !trials_now.iter().any(|pid| exists(*pid)));
}

#[test]
fn without_a_process_grammars_are_refused_as_the_fault_of_the_server() {
    let path = "/no/such/program".into();
    let program = WorkerProgram { path, args: Vec::new() };
    let server = Server::start(&Setup { trials: program, ..Setup::default() });
    for number in 0..2 {
        let reply = ask(server.address, number);
        let (status, reason, message) = refusal(&reply);
        assert_eq!((status, reason.as_str()), (503, Some("engine_unavailable")), "{message}");
        assert!(message.contains("cannot be started") && !message.contains("No such file"));
        assert!(reply.header("retry-after").is_some());
    }
    let plain = json!({"prompt": "x", "max_tokens": 9});
    assert_eq!(post(server.address, PATH, &plain).status, 200);
    assert_eq!(refused(server.address), 0);
    server.wait_idle(Duration::from_secs(5));
}
