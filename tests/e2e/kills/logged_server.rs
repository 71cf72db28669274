//! A server in a kill test whose log is read: messages about failed and restored groups of executors get a
//! timestamp.

use crate::child_watchdog::{CHILD_TIMEOUT, ChildWatchdog};
use crate::http::server_process::command;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStderr};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// Event of a group of executors that fail together, as logged by the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExecutorGroupEvent {
    /// The group has failed, and its remaining processes have exited.
    Failed,
    /// The group serves again.
    Restored,
}

/// Event of a group with its time.
pub(super) struct LoggedGroupEvent {
    pub(super) at: Instant,
    pub(super) event: ExecutorGroupEvent,
}

/// Events of each group with their times. The key is the replica that the log names for the group.
type ExecutorGroupEvents = BTreeMap<u16, Receiver<LoggedGroupEvent>>;

/// A `hadron serve` process with a thread that reads its log.
pub(super) struct LogWatchedServer {
    pub(super) child: Child,
    pub(super) address: SocketAddr,
}

impl LogWatchedServer {
    /// Starts the server; `groups` contains the first replica of each group that fails as a unit.
    pub(super) fn start(
        flags: &[String],
        groups: impl Iterator<Item = u16>,
    ) -> (Self, ExecutorGroupEvents) {
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let mut command = command(&[&["--port", "0"], &flags[..]].concat());
        let mut child = command.env("RUST_LOG", "info").spawn().unwrap();
        let watchdog = ChildWatchdog::start(child.id(), CHILD_TIMEOUT);
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut text = String::new();
        let address = loop {
            let mut line = String::new();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "no ready line: {text}");
            if let Some((_, rest)) = line.split_once(" on http://") {
                break rest.split(' ').next().unwrap().parse().unwrap();
            }
            text += &line;
        };
        watchdog.stop();
        let (to, from): (BTreeMap<_, _>, BTreeMap<_, _>) = groups
            .map(|replica| (replica, channel()))
            .map(|(replica, (to, from))| ((replica, to), (replica, from)))
            .unzip();
        std::thread::spawn(move || read(stderr, &to));
        (Self { child, address }, from)
    }
}

impl Drop for LogWatchedServer {
    fn drop(&mut self) {
        // The process has exited already unless the test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends the group events of a log until it ends. Reads every line, because a full pipe would block the
/// server.
fn read(stderr: BufReader<ChildStderr>, groups: &BTreeMap<u16, Sender<LoggedGroupEvent>>) {
    for line in stderr.lines().map_while(Result::ok) {
        let at = Instant::now();
        if line.contains(" ERROR ") {
            println!("{line}");
        }
        let Some((replica, event)) = parse(&line) else { continue };
        if let Some(group) = groups.get(&replica) {
            // Sending fails if the thread that kills this group's executors has ended, which is no error.
            let _ = group.send(LoggedGroupEvent { at, event });
        }
    }
}

fn parse(line: &str) -> Option<(u16, ExecutorGroupEvent)> {
    let event = if line.contains(": restarting replica=") {
        ExecutorGroupEvent::Failed
    } else if line.contains(": executors restarted replica=") {
        ExecutorGroupEvent::Restored
    } else {
        return None;
    };
    let (_, rest) = line.split_once(" replica=")?;
    Some((rest.split(' ').next()?.parse().ok()?, event))
}
