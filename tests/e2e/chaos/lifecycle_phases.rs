//! An executor is killed or stopped in each phase of its life: during start-up, as a replacement that is not
//! ready yet, while idle, in a prefill, in a decode step, and in the drain.

use super::{EXECUTOR_PROCESS_FLAGS, body, text_of};
use crate::bounded_child::{CHILD_TIMEOUT, finish_within};
use crate::deadlines::BoundedJoin as _;
use crate::http::executor_process::{children_as, executor, finish, send, stream_of, wait_until};
use crate::http::server_process::{ServerProcess, command};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_mins(1);
const PHASES: [&str; 5] = ["idle", "prefill", "decode", "restart", "drain"];
/// Flags with a short start-up timeout; a stopped executor delays the start until the timeout expires.
const START_UP: &[&str] = &["--startup-timeout", "10s"];

/// Sends `signal` to the executor in lifecycle phase `phase`. Outputs must equal the outputs recorded before
/// the signal, unless the drain truncates them.
fn executor_signalled(signal: &str, phase: &str) {
    let (long, short) = (body(500, 20, false), body(3, 400, false));
    let mut process = ServerProcess::start(
        &[EXECUTOR_PROCESS_FLAGS, START_UP, &["--shutdown-timeout", "30s"]].concat(),
    );
    let at = process.address;
    let (expected_long, expected_short) = (text_of(at, &long), text_of(at, &short));
    let former = executor(&process);
    match phase {
        "idle" => send(former, signal),
        "restart" => {
            send(former, "-KILL");
            let found = || children_as("executor", process.id()).into_iter().find(|p| *p != former);
            wait_until(TIMEOUT, "a replacement executor", || found().is_some());
            send(found().unwrap(), signal);
        }
        "prefill" => {
            // Records the output of a new prompt, then repeats the request with a cache salt, so that the
            // second request is no prefix hit and is in prefill when the signal arrives.
            let mut other = long.clone();
            other["prompt"] = "dog ".repeat(480).into();
            let expected = text_of(at, &other);
            other["cache_salt"] = "nobody else's".into();
            let asked = std::thread::spawn(move || text_of(at, &other));
            std::thread::sleep(Duration::from_millis(15));
            send(former, signal);
            assert_eq!(asked.join_bounded(), expected, "{signal} in a prefill");
        }
        "decode" | "drain" => {
            let stream = stream_of(at, &body(3, 400, true));
            if phase == "drain" {
                process.signal("TERM");
            }
            send(former, signal);
            let (text, end) = finish(stream);
            if phase == "drain" && end == "draining" {
                // A draining server does not start a new executor: the client gets the tokens generated so
                // far and a final event.
                assert!(expected_short.starts_with(&text), "{signal} in the drain: {text}");
            } else {
                assert_eq!(end, "length", "{signal}, {phase}");
                assert_eq!(text, expected_short, "{signal}, {phase}");
            }
        }
        other => panic!("{other}"),
    }
    if phase == "drain" {
        assert_eq!(process.exits_within(TIMEOUT).code(), Some(0), "{signal} in the drain");
        return;
    }
    assert_eq!(text_of(at, &long), expected_long, "{signal}, {phase}");
    assert_eq!(text_of(at, &short), expected_short, "{signal}, {phase}");
    assert_ne!(executor(&process), former);
}

#[test]
fn executor_killed_in_any_phase_only_delays_requests() {
    for phase in PHASES {
        executor_signalled("-KILL", phase);
    }
}

#[test]
fn executor_stopped_in_any_phase_only_delays_requests() {
    std::thread::scope(|scope| {
        for phase in PHASES {
            scope.spawn(move || executor_signalled("-STOP", phase));
        }
    });
}

/// The error that a server logs if its first executor gets `signal` before it is ready.
fn startup_error(signal: &str) -> String {
    let child =
        command(&[EXECUTOR_PROCESS_FLAGS, START_UP, &["--port", "0"]].concat()).spawn().unwrap();
    let found = || children_as("executor", child.id()).first().copied();
    wait_until(TIMEOUT, "an executor", || found().is_some());
    send(found().unwrap(), signal);
    let output = finish_within(child, CHILD_TIMEOUT, "a server whose executor fails to start");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    text
}

#[test]
fn executor_killed_before_ready_fails_startup_by_name() {
    let text = startup_error("-KILL");
    // The executor may be killed before it has reported its first phase.
    let names = ["(while: ", "cannot start the executor: the peer closed the link"];
    assert!(names.iter().any(|name| text.contains(name)), "{text}");
}

#[test]
fn executor_stopped_before_ready_fails_startup_by_name() {
    let text = startup_error("-STOP");
    assert!(text.contains("--startup-timeout"), "{text}");
}
