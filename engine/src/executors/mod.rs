//! Executors as the server sees them: a thread of its own, or a process for each rank, here or on another node.
//!
//! A thread serves the CPU where there is one rank; it cannot survive a fault. Processes can be lost and started
//! again, which is why GPUs and ranks that work together get no other home. The ranks of one replica are a
//! group, or those of all replicas if they step together: they live and die together.

mod executor_world;
mod group;
pub(crate) mod outbox;
mod process;
mod reader;
mod restart_policy;

pub use executor_world::{ExecutorWorld, RemoteNodes, StartPolicy};
pub(crate) use group::ExecutorGroup;
pub use group::ExecutorLaunchOptions;
pub(crate) use process::ExecutorProcess;
pub use process::ExecutorProgram;
pub(crate) use reader::spawn_readers;
pub use restart_policy::RestartPolicy;
pub(crate) use restart_policy::{FailureStage, NextStart};

use protocol::link::{LinkError, MessageReceiver};
use protocol::{Epoch, ExecutorCommand, ExecutorEvent, Rank};
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// Both directions of the links to the ranks of one replica.
pub struct ExecutorLink {
    /// To all of them. Holds more than there may be steps in flight, so that nobody waits for a device.
    pub commands: SyncSender<ExecutorCommand>,
    /// From each of them, in their order.
    pub receivers: Vec<ExecutorReceiver>,
}

/// The direction from an executor, and what is known about its other end.
pub struct ExecutorReceiver {
    /// Its messages.
    pub messages: Box<dyn MessageReceiver<Message = ExecutorEvent> + Send>,
    /// Generation that the executor belongs to.
    pub epoch: Epoch,
    /// Its place in the world.
    pub rank: Rank,
    /// The process it is; `None` = a thread of this one.
    pub process: Option<Arc<dyn ExecutorProcessHandle>>,
}

/// A process that is an executor, wherever it runs.
pub trait ExecutorProcessHandle: fmt::Display + Send + Sync {
    /// What became of it, now that its link is closed.
    fn exit_reason(&self) -> String;

    /// The node it runs on; `None` = this one.
    fn node(&self) -> Option<u16> {
        None
    }
}

impl ExecutorReceiver {
    /// What became of an executor whose link failed.
    pub fn failure_reason(&self, error: &LinkError) -> String {
        match (&self.process, error) {
            (None, _) => "the executor exited".to_owned(),
            (Some(process), LinkError::Closed) => process.exit_reason(),
            (Some(process), broken) => format!("{process}: {broken}"),
        }
    }

    /// The executor in words.
    fn name(&self) -> String {
        self.process.as_ref().map_or_else(|| "the executor".to_owned(), ToString::to_string)
    }
}
