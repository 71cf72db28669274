//! Executors as the server sees them: a thread of its own, or a process each.
//!
//! A thread serves the CPU; it cannot survive a fault. A process can be lost and started again, which
//! is why GPUs get no other home.

pub mod child;
mod group;
mod process;
mod reader;

pub use group::{ExecutorGroup, RestartError};
pub use process::ExecutorProcess;
pub(super) use reader::spawn_reader;

use protocol::link::{LinkError, Receiving};
use protocol::{Epoch, FromExecutor, ToExecutor};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// Both directions of the link to one executor.
pub struct ExecutorLink {
    /// To it. Holds more than there may be steps in flight, so that nobody waits for a device.
    pub to: SyncSender<ToExecutor>,
    /// From it.
    pub from: Incoming,
}

/// The direction from an executor, and what is known about its other end.
pub struct Incoming {
    /// Its messages.
    pub messages: Box<dyn Receiving<Message = FromExecutor> + Send>,
    /// Generation that the executor belongs to.
    pub epoch: Epoch,
    /// The process it is; `None` = a thread of this one.
    pub process: Option<Arc<ExecutorProcess>>,
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
}
