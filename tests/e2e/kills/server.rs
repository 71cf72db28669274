//! A server in a drill: when its log said what of which group.

use crate::http::process::command;
use crate::watchdog::{CHILD_WITHIN, Watchdog};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStderr};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// What the log says of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum News {
    /// It is lost, and what was left of it is gone.
    Lost,
    /// It serves again.
    Back,
}

/// By the replica that names a group.
type Groups = BTreeMap<u16, Receiver<(Instant, News)>>;

/// `hadron serve` whose log is read.
pub(super) struct Watched {
    pub(super) child: Child,
    pub(super) address: SocketAddr,
}

impl Watched {
    /// Starts it; `groups` are named by their first replicas.
    pub(super) fn start(flags: &[String], groups: impl Iterator<Item = u16>) -> (Self, Groups) {
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let mut command = command(&[&["--port", "0"], &flags[..]].concat());
        let mut child = command.env("RUST_LOG", "info").spawn().unwrap();
        let watchdog = Watchdog::start(child.id(), CHILD_WITHIN);
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        let address = loop {
            let mut line = String::new();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "no ready line: {said}");
            if let Some((_, rest)) = line.split_once(" on http://") {
                break rest.split(' ').next().unwrap().parse().unwrap();
            }
            said += &line;
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

impl Drop for Watched {
    fn drop(&mut self) {
        // Gone already unless something failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Passes news on until the log ends; nothing is left unread, or the server would wait for its reader.
fn read(stderr: BufReader<ChildStderr>, groups: &BTreeMap<u16, Sender<(Instant, News)>>) {
    for line in stderr.lines().map_while(Result::ok) {
        let now = Instant::now();
        if line.contains(" ERROR ") {
            println!("{line}");
        }
        let Some((replica, news)) = parse(&line) else { continue };
        if let Some(group) = groups.get(&replica) {
            // Who drills this group may be through.
            let _ = group.send((now, news));
        }
    }
}

fn parse(line: &str) -> Option<(u16, News)> {
    let news = if line.contains(": restarting replica=") {
        News::Lost
    } else if line.contains(": executor is back replica=") {
        News::Back
    } else {
        return None;
    };
    let (_, rest) = line.split_once(" replica=")?;
    Some((rest.split(' ').next()?.parse().ok()?, news))
}
