//! Executors as the server sees them: a thread of its own, or a process for each rank, here or on another node.
//!
//! A thread serves the CPU where there is one rank; it cannot survive a fault. Processes can be lost and started
//! again, which is why GPUs and ranks that work together get no other home. The ranks of one replica are a
//! group, or those of all replicas if they step together: they live and die together.

pub mod child;
mod group;
pub(super) mod outbox;
mod process;
mod reader;
mod restarts;
mod world;

pub use group::{ExecutorGroup, Lifetime};
pub use process::ExecutorProcess;
pub(super) use reader::spawn_readers;
pub use restarts::{FailureStage, NextStart, RestartHistory, RestartPolicy, RestartsExhausted};
pub use world::{Others, StartRules, World};

use protocol::link::{LinkError, Receiving};
use protocol::{Epoch, FromExecutor, Rank, ToExecutor};
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// Both directions of the links to the ranks of one replica.
pub struct ExecutorLink {
    /// To all of them. Holds more than there may be steps in flight, so that nobody waits for a device.
    pub to: SyncSender<ToExecutor>,
    /// From each of them, in their order.
    pub from: Vec<Incoming>,
}

/// The direction from an executor, and what is known about its other end.
pub struct Incoming {
    /// Its messages.
    pub messages: Box<dyn Receiving<Message = FromExecutor> + Send>,
    /// Generation that the executor belongs to.
    pub epoch: Epoch,
    /// Its place in the world.
    pub rank: Rank,
    /// The process it is; `None` = a thread of this one.
    pub process: Option<Arc<dyn Process>>,
}

/// A process that is an executor, wherever it runs.
pub trait Process: fmt::Display + Send + Sync {
    /// What became of it, now that its link is closed.
    fn ending(&self) -> String;

    /// The node it runs on; `None` = this one.
    fn node(&self) -> Option<u16> {
        None
    }
}

impl Incoming {
    /// What became of an executor whose link failed.
    pub fn cause(&self, error: &LinkError) -> String {
        match (&self.process, error) {
            (None, _) => "the executor exited".to_owned(),
            (Some(process), LinkError::Closed) => process.ending(),
            (Some(process), broken) => format!("{process}: {broken}"),
        }
    }

    /// The executor in words.
    fn name(&self) -> String {
        self.process.as_ref().map_or_else(|| "the executor".to_owned(), ToString::to_string)
    }
}
