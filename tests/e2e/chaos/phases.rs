//! An executor is killed or stopped in each phase: before it is ready, as a successor that is not ready yet, idle, in a prefill, in a
//! decode, in the drain.

use super::{APART, body, text_of};
use crate::http::executor_process::{children_as, executor, finish, send, stream_of, within};
use crate::http::process::{Process, command};
use crate::watchdog::{CHILD_WITHIN, Watchdog};
use std::io::Read;
use std::time::Duration;

const SOON: Duration = Duration::from_mins(1);
const PHASES: [&str; 5] = ["idle", "prefill", "decode", "restart", "drain"];
/// Time for a start, which one that is stopped uses up.
const START_UP: &[&str] = &["--startup-timeout", "10s"];

/// What is done to it, and in which phase.
fn harmed(signal: &str, phase: &str) {
    let (long, short) = (body(500, 20, false), body(3, 400, false));
    let mut process = Process::start(&[APART, START_UP, &["--shutdown-timeout", "30s"]].concat());
    let at = process.address;
    let (expected_long, expected_short) = (text_of(at, &long), text_of(at, &short));
    let former = executor(&process);
    match phase {
        "idle" => send(former, signal),
        "restart" => {
            send(former, "-KILL");
            let found = || children_as("executor", process.id()).into_iter().find(|p| *p != former);
            within(SOON, "a successor", || found().is_some());
            send(found().unwrap(), signal);
        }
        "prefill" => {
            // Another prompt, which no cached prefix shortens.
            let mut other = long.clone();
            other["prompt"] = "dog ".repeat(480).into();
            let expected = text_of(at, &other);
            other["cache_salt"] = "nobody else's".into();
            let asked = std::thread::spawn(move || text_of(at, &other));
            std::thread::sleep(Duration::from_millis(15));
            send(former, signal);
            assert_eq!(asked.join().unwrap(), expected, "{signal} in a prefill");
        }
        "decode" | "drain" => {
            let stream = stream_of(at, &body(3, 400, true));
            if phase == "drain" {
                process.signal("TERM");
            }
            send(former, signal);
            let (text, end) = finish(stream);
            if phase == "drain" && end == "draining" {
                // Whoever leaves starts no other executor: what there was is right, and the stream has its end.
                assert!(expected_short.starts_with(&text), "{signal} in the drain: {text}");
            } else {
                assert_eq!(end, "length", "{signal}, {phase}");
                assert_eq!(text, expected_short, "{signal}, {phase}");
            }
        }
        other => panic!("{other}"),
    }
    if phase == "drain" {
        assert_eq!(process.exits_within(SOON).code(), Some(0), "{signal} in the drain");
        return;
    }
    assert_eq!(text_of(at, &long), expected_long, "{signal}, {phase}");
    assert_eq!(text_of(at, &short), expected_short, "{signal}, {phase}");
    assert_ne!(executor(&process), former);
}

#[test]
fn executors_killed_in_any_phase_cost_time_only() {
    for phase in PHASES {
        harmed("-KILL", phase);
    }
}

#[test]
fn executors_stopped_in_any_phase_cost_time_only() {
    std::thread::scope(|scope| {
        for phase in PHASES {
            scope.spawn(move || harmed("-STOP", phase));
        }
    });
}

/// What a server says whose first executor is harmed before it is ready.
fn says_at_the_start(signal: &str) -> String {
    let mut child = command(&[APART, START_UP, &["--port", "0"]].concat()).spawn().unwrap();
    let found = || children_as("executor", child.id()).first().copied();
    within(SOON, "an executor", || found().is_some());
    send(found().unwrap(), signal);
    let mut said = String::new();
    let watchdog = Watchdog::start(child.id(), CHILD_WITHIN);
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(!watchdog.stop(), "it ends by itself: {said}");
    assert_eq!(child.wait().unwrap().code(), Some(1), "{said}");
    said
}

#[test]
fn an_executor_killed_before_it_is_ready_ends_the_start_by_name() {
    let said = says_at_the_start("-KILL");
    assert!(said.contains("(while: "), "{said}");
}

#[test]
fn an_executor_stopped_before_it_is_ready_ends_the_start_by_name() {
    let said = says_at_the_start("-STOP");
    assert!(said.contains("--startup-timeout"), "{said}");
}
