//! An executor process of another node, as far as node 0 knows it.

use crate::executors::ExecutorProcessHandle;
use protocol::Rank;
use std::fmt;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Its node tells how it ended at about the time at which its link closes.
const EXIT_REPORT_WAIT: Duration = Duration::from_secs(1);

/// The process at the other end of a link from another node.
pub(super) struct RemoteExecutor {
    rank: Rank,
    node: u16,
    /// How it ended, in its node's words.
    exit_text: Mutex<Option<String>>,
    reported: Condvar,
}

impl RemoteExecutor {
    /// One that runs.
    pub(super) fn new(rank: Rank, node: u16) -> Self {
        Self { rank, node, exit_text: Mutex::new(None), reported: Condvar::new() }
    }

    /// Its place in the world.
    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    /// Its node has said how it ended, or is gone. What was said first is the reason.
    pub(super) fn set_exit(&self, text: &str) {
        let mut end = self.exit_text.lock().unwrap_or_else(PoisonError::into_inner);
        end.get_or_insert_with(|| text.to_owned());
        self.reported.notify_all();
    }
}

impl ExecutorProcessHandle for RemoteExecutor {
    fn exit_reason(&self) -> String {
        let end = self.exit_text.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.reported.wait_timeout_while(end, EXIT_REPORT_WAIT, |end| end.is_none());
        match &*waited.unwrap_or_else(PoisonError::into_inner).0 {
            Some(text) => format!("node {}: {text}", self.node),
            None => format!("{self} closed its link"),
        }
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
