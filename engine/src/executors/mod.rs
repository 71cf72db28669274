//! Start and supervision of executors. An executor is a thread, or one process per rank, on this or another
//! node.
//!
//! A thread is used only for a CPU with one rank; a fault in it ends the server. Processes can fail and be
//! restarted, so GPUs and multiple ranks always use processes. The ranks of one replica form a group, on one or several nodes, that
//! fails and restarts as a whole. If the replicas run in lockstep (share experts and execute each step
//! together), the ranks of all replicas form one group.

mod executor_manager;
mod local_executors;
pub(crate) mod outbox;
mod process;
mod reader;
mod replica_group;
mod restart_policy;

pub use executor_manager::{ExecutorManager, RemoteNodes, StartPolicy};
pub use local_executors::ExecutorLaunchOptions;
pub(crate) use local_executors::LocalExecutors;
pub(crate) use process::ExecutorProcess;
pub use process::ExecutorProgram;
pub(crate) use reader::spawn_readers;
pub use restart_policy::RestartPolicy;
pub(crate) use restart_policy::{FailureStage, RestartAttempt};

use protocol::link::{LinkError, LinkSocket, MessageReceiver};
use protocol::{Epoch, ExecutorCommand, ExecutorEvent, Rank};
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// Link to the executors of one replica: a command queue to all of them and one message receiver per
/// executor.
pub struct ExecutorLink {
    /// Command queue to all ranks. Its capacity exceeds the number of steps in flight, so a send never waits
    /// until a device has finished a step.
    pub commands: SyncSender<ExecutorCommand>,
    /// Message receivers of the ranks, in rank order.
    pub receivers: Vec<ExecutorReceiver>,
}

/// Link to one executor process.
pub(crate) struct RankLink {
    /// Sending direction; the executor settings have been sent over it.
    pub(crate) sender: LinkSocket,
    pub(crate) receiver: ExecutorReceiver,
}

impl RankLink {
    /// Whether the process of the executor is known to have exited.
    pub(crate) fn has_exited(&self) -> bool {
        self.receiver.process.as_ref().is_some_and(|process| process.has_exited())
    }
}

/// Receiving direction of the link to an executor, with the identity of the executor.
pub struct ExecutorReceiver {
    /// Messages of the executor.
    pub messages: Box<dyn MessageReceiver<Message = ExecutorEvent> + Send>,
    /// Generation of the executor.
    pub epoch: Epoch,
    /// World rank of the executor.
    pub rank: Rank,
    /// Process of the executor; `None` if the executor is a thread of this process.
    pub process: Option<Arc<dyn ExecutorProcessHandle>>,
}

/// Handle to an executor process, on any node.
pub trait ExecutorProcessHandle: fmt::Display + Send + Sync {
    /// Describes how the process ended; called after the link of the process was closed.
    fn exit_reason(&self) -> String;

    /// Whether the process is known to have exited.
    fn has_exited(&self) -> bool;

    /// Returns the node of the process; `None` = this node.
    fn node(&self) -> Option<u16> {
        None
    }
}

impl ExecutorReceiver {
    /// Describes why the link of the executor failed.
    pub fn failure_reason(&self, error: &LinkError) -> String {
        match (&self.process, error) {
            (None, _) => "the executor exited".to_owned(),
            (Some(process), LinkError::Closed) => process.exit_reason(),
            (Some(process), broken) => format!("{process}: {broken}"),
        }
    }

    /// Display name of the executor.
    fn name(&self) -> String {
        self.process.as_ref().map_or_else(|| "the executor".to_owned(), ToString::to_string)
    }
}
