//! The main thread of a server: waits for whatever ends it, and starts lost executors again.

use super::engine_thread::Notice;
use super::executor::World;
use super::host::Host;
use super::shutdown::Front;
use protocol::{Epoch, Replica};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

/// The executors, and what the main thread hears of them.
pub struct Supervised {
    /// How to start them.
    pub world: World,
    /// What happens.
    pub notices: Receiver<Notice>,
    /// For those who start something on its behalf.
    pub sender: Sender<Notice>,
    /// Replicas whose executors are there.
    up: Vec<bool>,
}

impl Supervised {
    /// All executors are there.
    pub fn new(world: World, notices: Receiver<Notice>, sender: Sender<Notice>) -> Self {
        let up = vec![true; usize::from(world.settings().parallel.dp_size)];
        Self { world, notices, sender, up }
    }

    /// Whether a replica serves.
    pub fn serves(&self) -> bool {
        self.up.contains(&true)
    }

    /// Takes note that the executors of a replica, and of those that step with it, are there, or are not.
    pub fn set_up(&mut self, replica: Replica, up: bool) {
        for replica in self.world.group_of(replica) {
            self.up[usize::from(replica)] = up;
        }
    }

    /// Starts executors again, a replica's or its group's; their streams have nothing to wait for if that is over.
    fn restart(&mut self, host: &Host, replica: Replica, epoch: Epoch, cause: String) {
        self.set_up(replica, false);
        if let Err(error) = self.world.restart(replica, epoch, cause, &self.sender) {
            host.give_up(error.to_string()); // The answer is `EngineFailed`.
        }
    }

    /// Ends the executors, which have been told to stop.
    pub fn shut_down(&mut self, patience: Duration) {
        let up = &self.up;
        self.world.shut_down(patience, |replica| up[usize::from(replica.0)]);
    }
}

/// Serves until told to stop, or until nothing can be served any more. Returns the process's exit code.
///
/// `timeout`: how long streams may run on after a signal.
pub fn run(
    front: &Front<'_>,
    host: Host,
    mut supervised: Supervised,
    timeout: Duration,
) -> ExitCode {
    loop {
        match supervised.notices.recv() {
            Ok(Notice::Signal(number)) => {
                // Where nobody computes, streams have nothing to wait for.
                let timeout = if supervised.serves() { timeout } else { Duration::ZERO };
                return front.drain(number, timeout, host, supervised);
            }
            Ok(Notice::EngineFailed(text)) => return front.fail(&text),
            Ok(Notice::Up { replica, outcome: Ok((links, ready)), .. }) => {
                host.resume(replica, links, &ready);
                supervised.set_up(replica, true);
            }
            Ok(
                Notice::ExecutorLost { replica, epoch, cause }
                | Notice::Up { replica, epoch, outcome: Err(cause) },
            ) => {
                supervised.restart(&host, replica, epoch, cause);
            }
            Err(_) => return front.fail("nobody watches this process any more"),
        }
    }
}
