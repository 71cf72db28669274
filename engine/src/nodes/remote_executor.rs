//! State that node 0 keeps of an executor process on another node.

use crate::executors::ExecutorProcessHandle;
use protocol::Rank;
use std::fmt;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Maximum wait for the exit report from the executor's node; the report arrives at about the time at which
/// the link closes.
const EXIT_REPORT_WAIT: Duration = Duration::from_secs(1);

/// Executor process on another node, which is connected to node 0.
pub(super) struct RemoteExecutor {
    rank: Rank,
    node: u16,
    /// Description of the exit, as reported by the node.
    exit_text: Mutex<Option<String>>,
    reported: Condvar,
}

impl RemoteExecutor {
    /// Creates the state of a running executor, whose exit has not been reported.
    pub(super) fn new(rank: Rank, node: u16) -> Self {
        Self { rank, node, exit_text: Mutex::new(None), reported: Condvar::new() }
    }

    /// World rank of the executor.
    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    /// Records the exit reported by the node of the executor, or the failure of this node. Only the first
    /// report is kept.
    pub(super) fn set_exit(&self, text: &str) {
        let mut exit_text = self.exit_text.lock().unwrap_or_else(PoisonError::into_inner);
        exit_text.get_or_insert_with(|| text.to_owned());
        self.reported.notify_all();
    }
}

impl ExecutorProcessHandle for RemoteExecutor {
    fn exit_reason(&self) -> String {
        let exit_text = self.exit_text.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .reported
            .wait_timeout_while(exit_text, EXIT_REPORT_WAIT, |exit_text| exit_text.is_none());
        match &*waited.unwrap_or_else(PoisonError::into_inner).0 {
            Some(text) => format!("node {}: {text}", self.node),
            None => format!("{self} closed its link"),
        }
    }

    fn has_exited(&self) -> bool {
        self.exit_text.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn node(&self) -> Option<u16> {
        Some(self.node)
    }
}

impl fmt::Display for RemoteExecutor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "executor rank {} (node {})", self.rank.0, self.node)
    }
}
