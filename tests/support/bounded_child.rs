//! Timeouts for child processes: a wait for a child process or for its output always ends, and fails with a
//! message if the timeout was reached.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Timeout for a child process to become ready, or to exit when it is expected to exit. It is minutes long
/// for machines under load.
pub(crate) const CHILD_TIMEOUT: Duration = Duration::from_mins(4);
/// Timeout of a killed process. Only a process in an uninterruptible system call needs longer.
const KILL_TIMEOUT: Duration = Duration::from_mins(1);
/// Interval between two checks whether a child process has exited.
const EXIT_POLL: Duration = Duration::from_millis(2);

/// The text that a child process writes to a pipe. A thread reads the pipe, so that the process never waits for
/// its reader, and every wait for a line has a deadline.
pub(crate) struct ChildPipe {
    lines: Mutex<Receiver<Vec<u8>>>,
}

impl ChildPipe {
    /// Starts the thread that reads `pipe`.
    pub(crate) fn start(pipe: impl Read + Send + 'static) -> Self {
        let (line_sender, lines) = channel();
        // Sending fails if nothing reads the lines any more, which is no error.
        read_lines(pipe, move |line| drop(line_sender.send(line)));
        Self { lines: Mutex::new(lines) }
    }

    /// Returns the next line with its line feed; `None` = the pipe is closed. Panics after `limit`.
    #[track_caller]
    pub(crate) fn next_line(&self, limit: Duration) -> Option<String> {
        let line = self.next_bytes(limit)?;
        Some(String::from_utf8_lossy(&line).into_owned())
    }

    /// Returns the rest of the text. The process is expected to exit: panics if the pipe is still open after
    /// `CHILD_TIMEOUT`.
    #[track_caller]
    pub(crate) fn rest(&self) -> String {
        String::from_utf8_lossy(&self.rest_bytes(Instant::now() + CHILD_TIMEOUT)).into_owned()
    }

    /// Starts a thread that calls `on_line` with each further line until the pipe is closed.
    #[expect(clippy::disallowed_methods, reason = "no test waits for the thread")]
    pub(crate) fn for_each(self, mut on_line: impl FnMut(String) + Send + 'static) {
        std::thread::spawn(move || {
            let lines = self.lines.into_inner().unwrap();
            while let Ok(line) = lines.recv() {
                on_line(String::from_utf8_lossy(&line).into_owned());
            }
        });
    }

    #[track_caller]
    fn next_bytes(&self, limit: Duration) -> Option<Vec<u8>> {
        let received = self.lines.lock().unwrap().recv_timeout(limit);
        match received {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("no line and no end of a pipe in {limit:?}"),
        }
    }

    #[track_caller]
    fn rest_bytes(&self, until: Instant) -> Vec<u8> {
        let left = || until.saturating_duration_since(Instant::now());
        std::iter::from_fn(|| self.next_bytes(left())).flatten().collect()
    }
}

/// Starts a thread that calls `on_line` with each line of a pipe, with its line feed, until the pipe is closed.
pub(crate) fn read_lines(
    pipe: impl Read + Send + 'static,
    mut on_line: impl FnMut(Vec<u8>) + Send + 'static,
) {
    std::thread::spawn(move || {
        let mut pipe = BufReader::new(pipe);
        loop {
            let mut line = Vec::new();
            match pipe.read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => on_line(line),
            }
        }
    });
}

/// Waits until a child process exits; `None` = it still runs after `limit`.
pub(crate) fn exit_within(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let start = Instant::now();
    loop {
        match child.try_wait().unwrap() {
            None if start.elapsed() < limit => std::thread::sleep(EXIT_POLL),
            status => return status,
        }
    }
}

/// Waits until a child process exits. After `limit` kills it and panics.
#[track_caller]
pub(crate) fn wait_within(child: &mut Child, limit: Duration) -> ExitStatus {
    exit_within(child, limit).unwrap_or_else(|| {
        end_child(child);
        panic!("process {} still ran after {limit:?}", child.id())
    })
}

/// Kills a child process, which may have exited already, and waits for its exit.
pub(crate) fn end_child(child: &mut Child) {
    let _ = child.kill(); // The process may have exited already.
    let _ = exit_within(child, KILL_TIMEOUT);
}

/// Runs a command until it exits, and returns its output.
#[track_caller]
pub(crate) fn run_to_end(command: &mut Command) -> Output {
    run_within(command, CHILD_TIMEOUT)
}

/// Runs a command until it exits, which must be within `limit`, and returns its output.
#[track_caller]
pub(crate) fn run_within(command: &mut Command, limit: Duration) -> Output {
    start_and_finish(command, limit).unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Runs a command until it exits, and returns its output; `None` = the program is not installed.
#[track_caller]
pub(crate) fn run_if_installed(command: &mut Command) -> Option<Output> {
    match start_and_finish(command, CHILD_TIMEOUT) {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        output => Some(output.unwrap_or_else(|error| panic!("{command:?}: {error}"))),
    }
}

#[track_caller]
fn start_and_finish(command: &mut Command, limit: Duration) -> io::Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(finish_within(command.spawn()?, limit, &format!("{command:?}")))
}

/// Waits until a child process exits, which must be within `limit`, and returns its output. `name` is a part of
/// the message if it does not.
#[track_caller]
pub(crate) fn finish_within(mut child: Child, limit: Duration, name: &str) -> Output {
    let until = Instant::now() + limit;
    let stdout = child.stdout.take().map(ChildPipe::start);
    let stderr = child.stderr.take().map(ChildPipe::start);
    let status = exit_within(&mut child, limit);
    if status.is_none() {
        end_child(&mut child);
    }
    // Processes that the child started may still have the pipes open.
    let until = until.max(Instant::now() + KILL_TIMEOUT);
    let rest = |pipe: Option<ChildPipe>| pipe.map_or(Vec::new(), |pipe| pipe.rest_bytes(until));
    let (stdout, stderr) = (rest(stdout), rest(stderr));
    let Some(status) = status else {
        panic!("it did not end within {limit:?}: {name}: {}", String::from_utf8_lossy(&stderr))
    };
    Output { status, stdout, stderr }
}

/// Sends a signal to a process with `kill`; returns whether the process existed.
pub(crate) fn send_signal(pid: u32, signal: &str) -> bool {
    let mut kill = Command::new("kill");
    run_to_end(kill.args([signal, "--", &pid.to_string()])).status.success()
}

#[cfg(test)]
mod watchdog_tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn panic_text<T>(run: impl FnOnce() -> T) -> String {
        let panic = catch_unwind(AssertUnwindSafe(run)).err().expect("a panic");
        panic.downcast_ref::<String>().expect("a formatted text").clone()
    }

    #[test]
    fn hung_child_is_killed_and_named() {
        let mut sleeps = Command::new("sleep");
        sleeps.arg("600");
        let text = panic_text(|| run_within(&mut sleeps, Duration::from_millis(50)));
        assert!(text.contains("did not end within 50ms") && text.contains("sleep"), "{text}");
        assert!(run_within(&mut Command::new("true"), CHILD_TIMEOUT).status.success());
        let mut child = sleeps.spawn().unwrap();
        let text = panic_text(|| wait_within(&mut child, Duration::from_millis(50)));
        assert_eq!(text, format!("process {} still ran after 50ms", child.id()));
        assert!(child.try_wait().unwrap().is_some(), "it was killed");
    }

    #[test]
    fn lines_of_a_child_have_a_deadline() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "printf 'a\\nb'; exec sleep 600"]).stdout(Stdio::piped());
        let mut child = shell.spawn().unwrap();
        let pipe = ChildPipe::start(child.stdout.take().unwrap());
        assert_eq!(pipe.next_line(CHILD_TIMEOUT).as_deref(), Some("a\n"));
        let text = panic_text(|| pipe.next_line(Duration::from_millis(50)));
        assert_eq!(text, "no line and no end of a pipe in 50ms");
        end_child(&mut child);
        assert_eq!(pipe.rest(), "b");
        assert_eq!(pipe.next_line(CHILD_TIMEOUT), None);
    }
}
