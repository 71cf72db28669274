//! A server in a kill test whose log is read: messages about failed and restored groups of executors get a
//! timestamp.

use crate::bounded_child::{ChildPipe, end_child};
use crate::http::server_process::{command, ready_line};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::Child;
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
        let stderr = ChildPipe::start(child.stderr.take().unwrap());
        let address = ready_line(&stderr).address;
        let (to, from): (BTreeMap<_, _>, BTreeMap<_, _>) = groups
            .map(|replica| (replica, channel()))
            .map(|(replica, (to, from))| ((replica, to), (replica, from)))
            .unzip();
        stderr.for_each(move |line| send_event(&line, &to));
        (Self { child, address }, from)
    }
}

impl Drop for LogWatchedServer {
    fn drop(&mut self) {
        end_child(&mut self.child);
    }
}

/// Sends the group event of a line of the log, if there is any.
fn send_event(line: &str, groups: &BTreeMap<u16, Sender<LoggedGroupEvent>>) {
    let at = Instant::now();
    if line.contains(" ERROR ") {
        print!("{line}");
    }
    let Some((replica, event)) = parse(line) else { return };
    if let Some(group) = groups.get(&replica) {
        // Sending fails if the thread that kills this group's executors has ended, which is no error.
        let _ = group.send(LoggedGroupEvent { at, event });
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
