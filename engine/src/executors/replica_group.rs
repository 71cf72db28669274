//! Executor group of a server, on this node or on another one, and the result of starting it.

use super::ExecutorLink;
use super::group::ExecutorGroup;
use crate::engine_loop::ExecutorRestartFailure;
use crate::nodes::{PendingRemoteStart, RemoteExecutorGroup};
use crate::startup::{ExecutorStartupParams, StartError};
use anyhow::Result;
use protocol::{Epoch, ExecutorReady, ExecutorSettings};
use std::ops::Range;

/// Executor group: executors that fail and restart together, on this node or on another one.
pub(super) enum AnyExecutorGroup {
    Local(ExecutorGroup),
    Remote(RemoteExecutorGroup),
}

/// Result of starting a group: the links to executors on this node, or, for a group on another node, a start
/// whose executors have not connected yet.
pub(super) enum StartedGroup {
    Local(Vec<ExecutorLink>),
    Remote(PendingRemoteStart),
}

impl AnyExecutorGroup {
    /// Replicas of the group.
    pub(super) fn replicas(&self) -> Range<u16> {
        match self {
            Self::Local(group) => group.replicas(),
            Self::Remote(group) => group.replica().0..group.replica().0 + 1,
        }
    }

    /// Settings common to all executors of the group, without rank and host-specific values.
    pub(super) fn settings(&self) -> &ExecutorSettings {
        match self {
            Self::Local(group) => group.executor_settings(),
            Self::Remote(group) => group.settings(),
        }
    }

    /// Digest of the model folder. Every executor must report an equal digest at start-up.
    pub(super) fn manifest(&self) -> u64 {
        match self {
            Self::Local(group) => group.manifest(),
            Self::Remote(group) => group.manifest(),
        }
    }

    /// Whether an executor of this node has exited.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self, Self::Local(group) if group.has_ended())
    }

    /// Ends the remaining executors after a failure: kills local ones, or closes the links of remote ones.
    pub(super) fn fence(&mut self) {
        match self {
            Self::Local(group) => group.fence(),
            Self::Remote(group) => group.close(),
        }
    }

    /// Starts the executors with the epoch (executor generation) `epoch`, or sends a start command to their
    /// node.
    pub(super) fn start(&mut self, epoch: Epoch) -> Result<StartedGroup> {
        match self {
            Self::Local(group) => group.start(epoch).map(StartedGroup::Local),
            Self::Remote(group) => Ok(StartedGroup::Remote(group.start(epoch))),
        }
    }
}

impl StartedGroup {
    /// Returns the links to the started executors. For a group on another node, waits without a time limit
    /// for that node to join, then for a limited time (`LINK_WAIT`) for its executors to connect.
    fn links(self) -> Result<Vec<ExecutorLink>, StartError> {
        match self {
            Self::Local(links) => Ok(links),
            Self::Remote(pending_start) => {
                let cancelled = || {
                    let cause = "the start was cancelled".to_owned();
                    StartError::Exited { phase: "start", cause }
                };
                let link = pending_start.link(None, || false)?.ok_or_else(cancelled)?;
                Ok(vec![link])
            }
        }
    }

    /// Waits until the executors of a restarted group are ready, each with at most `blocks_max` KV blocks;
    /// returns the links to the executors.
    pub(super) fn bring_up(
        self,
        start: ExecutorStartupParams,
        blocks_max: u32,
    ) -> Result<(Vec<ExecutorLink>, ExecutorReady), StartError> {
        let mut links = self.links()?;
        let size = |blocks: u32| blocks.min(blocks_max);
        let report = start.bring_up(&mut links, size, || None, |_, _, _| {})?;
        Ok((links, report.ready))
    }
}

impl From<StartError> for ExecutorRestartFailure {
    fn from(error: StartError) -> Self {
        Self { failure: error.failure(), text: error.to_string() }
    }
}
