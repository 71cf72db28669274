//! Executor group of a replica on another node: that node starts the executors, and the executors connect to
//! node 0, which runs the scheduler.

use super::node_registry::NodeRegistry;
use super::start_command::{PendingLink, StartCommandProgress};
use crate::executors::{ExecutorLink, ExecutorProcessHandle, ExecutorReceiver, outbox};
use crate::startup::{ExecutorLabel, StartError};
use executor::ExecutorConfig;
use protocol::link::{FrameReader, FrameWriter, LinkSocket, MessageSender};
use protocol::{Epoch, ExecutorSettings, HostSettings, Rank, Replica};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Poll interval while the connections of executors are awaited.
const POLL: Duration = Duration::from_millis(100);
/// Maximum time from a start command until all its executors have connected.
const LINK_WAIT: Duration = Duration::from_secs(30);

/// Executor group of one replica on another node; can be started repeatedly.
pub(crate) struct RemoteExecutorGroup {
    config: ExecutorConfig,
    replica: Replica,
    node: u16,
    registry: Arc<NodeRegistry>,
}

/// Start that was commanded on another node and whose executors have not all connected yet.
pub(crate) struct PendingRemoteStart {
    registry: Arc<NodeRegistry>,
    replica: Replica,
    node: u16,
    settings: Box<ExecutorSettings>,
}

impl RemoteExecutorGroup {
    /// Creates the group without starting its executors. At each start, every rank receives `config` with the
    /// settings of its host.
    pub(crate) fn new(
        config: ExecutorConfig,
        replica: Replica,
        node: u16,
        registry: Arc<NodeRegistry>,
    ) -> Self {
        Self { config, replica, node, registry }
    }

    /// Replica of the group.
    pub(crate) fn replica(&self) -> Replica {
        self.replica
    }

    /// Settings common to the executors, without rank and host-specific values.
    pub(crate) fn settings(&self) -> &ExecutorSettings {
        &self.config.settings
    }

    /// Digest of the model folder. Every executor must report an equal digest at start-up.
    pub(crate) fn manifest(&self) -> u64 {
        self.config.manifest
    }

    /// Commands the node to start the executors with the epoch (executor generation) `epoch`, and closes the
    /// connections of the previous executors.
    pub(crate) fn start(&mut self, epoch: Epoch) -> PendingRemoteStart {
        let settings = ExecutorSettings { epoch, ..self.config.settings.clone() };
        let first = self.replica.0 * settings.parallel.tp_size;
        let ranks = (first..first + settings.parallel.tp_size).map(Rank).collect();
        self.registry.command_start(self.replica, self.node, epoch, ranks);
        let registry = Arc::clone(&self.registry);
        let settings = Box::new(settings);
        PendingRemoteStart { registry, replica: self.replica, node: self.node, settings }
    }

    /// Closes the links of the executors. An executor ends when its link is closed.
    pub(crate) fn close(&self) {
        self.registry.close(self.replica);
    }
}

/// Common deadline for all nodes to join the cluster, at the time `since` plus `limit`: the wait for one node
/// does not extend the deadline of the next node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct JoinDeadline {
    pub(crate) since: Instant,
    pub(crate) limit: Duration,
}

impl JoinDeadline {
    /// Checks, for a node that has not joined, that the deadline has not passed.
    fn check(self, node: u16) -> Result<(), StartError> {
        let Self { since, limit } = self;
        if since.elapsed() > limit { Err(StartError::NodeMissing { node, limit }) } else { Ok(()) }
    }
}

impl PendingRemoteStart {
    /// Waits until all executors have connected and returns the link to them. Returns `None` if
    /// `is_cancelled` ends the wait. `join_deadline` limits the wait for a node that has not joined.
    pub(crate) fn link(
        self,
        join_deadline: Option<JoinDeadline>,
        is_cancelled: impl FnMut() -> bool,
    ) -> Result<Option<ExecutorLink>, StartError> {
        let links =
            wait_for_links(&self.registry, self.replica, self.node, join_deadline, is_cancelled)?;
        links.map(|links| self.connect(links)).transpose()
    }

    /// Sends the settings to each executor over its connection in `links`; returns the link to all executors.
    fn connect(&self, links: Vec<PendingLink>) -> Result<ExecutorLink, StartError> {
        let epoch = self.settings.epoch;
        let (mut senders, mut receivers) = (Vec::new(), Vec::new());
        for PendingLink { rank, stream, host, executor } in links {
            let HostSettings { model_dir, libraries, kernel_cache, threads, rendezvous } = host;
            let own = ExecutorSettings::clone(&self.settings);
            let settings = ExecutorSettings {
                rank,
                model_dir,
                libraries,
                kernel_cache,
                threads,
                rendezvous,
                ..own
            };
            let mut writer = FrameWriter::new(LinkSocket::from(stream.try_clone()?), epoch);
            if let Err(error) = writer.send(settings) {
                let cause = format!("{executor}: {error}");
                return Err(StartError::Exited { phase: "start", cause });
            }
            senders.push(writer.into_stream());
            let process: Arc<dyn ExecutorProcessHandle> = executor;
            let messages = Box::new(FrameReader::new(LinkSocket::from(stream), epoch));
            receivers.push(ExecutorReceiver { messages, epoch, rank, process: Some(process) });
        }
        Ok(ExecutorLink { commands: outbox::start(senders, epoch)?, receivers })
    }
}

/// Waits until the executors of a replica on another node have connected; returns their connections, or
/// `None` if `is_cancelled` ends the wait. `join_deadline` limits the wait for a node that has not joined.
fn wait_for_links(
    registry: &NodeRegistry,
    replica: Replica,
    node: u16,
    join_deadline: Option<JoinDeadline>,
    mut is_cancelled: impl FnMut() -> bool,
) -> Result<Option<Vec<PendingLink>>, StartError> {
    let (mut is_logged, label, phase) = (false, ExecutorLabel::of_node(node), "start");
    while !is_cancelled() {
        match registry.advance_start(replica) {
            StartCommandProgress::Linked(links) => return Ok(Some(links)),
            StartCommandProgress::Failed(text) => {
                return Err(StartError::Reported { executor: label, phase, text });
            }
            StartCommandProgress::Issued(at) if at.elapsed() > LINK_WAIT => {
                return Err(StartError::Stalled { executor: label, phase, limit: LINK_WAIT });
            }
            StartCommandProgress::Issued(_) => {}
            StartCommandProgress::NodeDisconnected if !is_logged => {
                is_logged = true;
                tracing::info!(node, replica = replica.0, "waiting for the node");
            }
            StartCommandProgress::NodeDisconnected => {
                join_deadline.map_or(Ok(()), |join_deadline| join_deadline.check(node))?;
            }
        }
        registry.wait_for_change(POLL);
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::super::ClusterRequirements;
    use super::*;
    use protocol::ParallelConfig;
    use std::thread;

    #[test]
    fn join_deadline_is_shared_by_all_nodes() {
        let parallel = ParallelConfig { dp_size: 3, ..ParallelConfig::default() };
        let registry = NodeRegistry::new(ClusterRequirements { nodes: 3, parallel, manifest: 7 });
        registry.command_start(Replica(2), 2, Epoch(1), vec![Rank(2)]);
        let limit = Duration::from_secs(1);
        let join_deadline = JoinDeadline { since: Instant::now(), limit };
        // Wait until the join deadline has passed.
        while join_deadline.since.elapsed() <= limit {
            thread::sleep(POLL);
        }
        let mut polls = 0;
        let is_cancelled = || {
            polls += 1;
            false
        };
        let Err(error) =
            wait_for_links(&registry, Replica(2), 2, Some(join_deadline), is_cancelled)
        else {
            panic!("linked without a node")
        };
        assert!(matches!(error, StartError::NodeMissing { node: 2, .. }), "{error}");
        assert_eq!(polls, 2, "one poll to log the wait, one to fail");
    }
}
