//! Executor group of a server, whose executors may be on several nodes, and the result of starting it.

use super::local_executors::{LocalExecutors, LocalLinks};
use super::{ExecutorLink, RankLink, outbox};
use crate::engine_loop::ExecutorRestartFailure;
use crate::nodes::{JoinDeadline, PendingRemoteStart, RemoteExecutors};
use crate::startup::{ExecutorStartupParams, StartError};
use anyhow::Result;
use protocol::{Epoch, ExecutorReady};
use std::ops::Range;
use std::time::Duration;

/// Executors that fail and restart together: those of one replica, or of all replicas that run in lockstep.
pub(super) struct ExecutorGroup {
    pub(super) replicas: Range<u16>,
    pub(super) tp_size: u16,
    /// Executors of this node, if it has any of the group.
    pub(super) local: Option<LocalExecutors>,
    /// Executors of each other node that has some of the group.
    pub(super) remote: Vec<RemoteExecutors>,
}

/// Started group: the links to executors on this node, and the starts on other nodes whose executors have not connected yet.
pub(super) struct StartedGroup {
    epoch: Epoch,
    tp_size: u16,
    local: Option<LocalLinks>,
    remote: Vec<PendingRemoteStart>,
}

impl ExecutorGroup {
    /// Whether an executor of this node has exited.
    pub(super) fn has_ended(&self) -> bool {
        self.local.as_ref().is_some_and(LocalExecutors::has_ended)
    }

    /// Ends the remaining executors after a failure: kills local ones, and closes the links of remote ones.
    pub(super) fn fence(&mut self) {
        if let Some(local) = &mut self.local {
            local.fence();
        }
        self.remote.iter().for_each(RemoteExecutors::close);
    }

    /// Starts the executors with the epoch (executor generation) `epoch`, and sends a start command to each other node. Must be
    /// called on the main thread.
    pub(super) fn start(&mut self, epoch: Epoch) -> Result<StartedGroup> {
        let local = self.local.as_mut().map(|local| local.start(epoch)).transpose()?;
        let remote = self.remote.iter().map(|remote| remote.start(epoch)).collect();
        Ok(StartedGroup { epoch, tp_size: self.tp_size, local, remote })
    }

    /// Waits up to `timeout` for executors that have been commanded to stop, then kills them. Executors that are still starting
    /// (`is_up` is false) are killed immediately. Other nodes stop the executors that were commanded to stop themselves.
    pub(super) fn shut_down(&mut self, timeout: Duration, is_up: bool) {
        match &mut self.local {
            Some(local) if is_up => local.shut_down(timeout),
            Some(local) => local.kill(),
            None => {}
        }
        if !is_up {
            self.remote.iter().for_each(RemoteExecutors::close);
        }
    }
}

impl StartedGroup {
    /// Returns one link per replica. Waits for nodes to join, limited by `join_deadline`, then for a limited time (`LINK_WAIT`)
    /// for their executors to connect. If `is_cancelled` or the exit of an executor ends the wait, returns the links to the
    /// executors that have connected; the link to the exited executor reports the reason.
    pub(super) fn links(
        self,
        join_deadline: Option<JoinDeadline>,
        mut is_cancelled: impl FnMut() -> bool,
    ) -> Result<Vec<ExecutorLink>, StartError> {
        let mut ranks = match self.local {
            Some(LocalLinks::Thread(link)) => return Ok(vec![link]),
            Some(LocalLinks::Processes(links)) => links,
            None => Vec::new(),
        };
        for pending_start in self.remote {
            let ends = || is_cancelled() || ranks.iter().any(RankLink::has_exited);
            ranks.extend(pending_start.links(join_deadline, ends)?.unwrap_or_default());
        }
        ranks.sort_by_key(|link| link.receiver.rank);
        let mut replicas = Vec::new();
        let replica_of = |link: &RankLink| link.receiver.rank.0 / self.tp_size;
        while let Some(replica) = ranks.first().map(replica_of) {
            let count = ranks.iter().take_while(|link| replica_of(link) == replica).count();
            replicas.push(replica_link(ranks.drain(..count), self.epoch)?);
        }
        Ok(replicas)
    }

    /// Waits until the executors of a restarted group are ready, each with at most `blocks_max` KV blocks;
    /// returns the links to the executors. Waits without a time limit for nodes to join.
    pub(super) fn bring_up(
        self,
        start: ExecutorStartupParams,
        blocks_max: u32,
    ) -> Result<(Vec<ExecutorLink>, ExecutorReady), StartError> {
        let mut links = self.links(None, || false)?;
        let size = |blocks: u32| blocks.min(blocks_max);
        let report = start.bring_up(&mut links, size, || None, |_, _, _| {})?;
        Ok((links, report.ready))
    }
}

/// Combines the links to the ranks of a replica.
fn replica_link(
    ranks: impl Iterator<Item = RankLink>,
    epoch: Epoch,
) -> Result<ExecutorLink, StartError> {
    let (senders, receivers) =
        ranks.map(|RankLink { sender, receiver }| (sender, receiver)).unzip();
    Ok(ExecutorLink { commands: outbox::start(senders, epoch)?, receivers })
}

impl From<StartError> for ExecutorRestartFailure {
    fn from(error: StartError) -> Self {
        Self { failure: error.failure(), text: error.to_string() }
    }
}
