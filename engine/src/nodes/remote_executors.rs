//! Executors of a group on another node: that node starts the executors, and the executors connect to
//! node 0, which runs the scheduler.

use super::node_registry::NodeRegistry;
use super::start_command::{PendingLink, StartCommandProgress};
use crate::executors::{ExecutorProcessHandle, ExecutorReceiver, RankLink};
use crate::startup::{ExecutorLabel, StartError};
use executor::ExecutorConfig;
use protocol::link::{FrameReader, FrameWriter, LinkSocket, MessageSender};
use protocol::{Epoch, ExecutorSettings, HostSettings, Rank};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Poll interval while the connections of executors are awaited.
const POLL: Duration = Duration::from_millis(100);
/// Maximum time from a start command until all its executors have connected.
const LINK_WAIT: Duration = Duration::from_secs(30);

/// Executors of one group on another node; can be started repeatedly.
pub(crate) struct RemoteExecutors {
    config: ExecutorConfig,
    /// World ranks of the executors.
    ranks: Range<u16>,
    node: u16,
    registry: Arc<NodeRegistry>,
}

/// Start that was commanded on another node and whose executors have not all connected yet.
pub(crate) struct PendingRemoteStart {
    registry: Arc<NodeRegistry>,
    first_rank: Rank,
    node: u16,
    settings: Box<ExecutorSettings>,
}

impl RemoteExecutors {
    /// Describes the executors with the world ranks `ranks`, without starting them. At each start, every rank receives `config`
    /// with the settings of its host.
    pub(crate) fn new(
        config: ExecutorConfig,
        ranks: Range<u16>,
        node: u16,
        registry: Arc<NodeRegistry>,
    ) -> Self {
        Self { config, ranks, node, registry }
    }

    /// Commands the node to start the executors with the epoch (executor generation) `epoch`, and closes the
    /// connections of the previous executors.
    pub(crate) fn start(&self, epoch: Epoch) -> PendingRemoteStart {
        let settings = Box::new(ExecutorSettings { epoch, ..self.config.settings.clone() });
        let first_rank = Rank(self.ranks.start);
        self.registry.command_start(self.node, epoch, self.ranks.clone());
        let registry = Arc::clone(&self.registry);
        PendingRemoteStart { registry, first_rank, node: self.node, settings }
    }

    /// Closes the links of the executors. An executor ends when its link is closed.
    pub(crate) fn close(&self) {
        self.registry.close(Rank(self.ranks.start));
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
    /// Waits until all executors have connected and returns the links to them. Returns `None` if
    /// `is_cancelled` ends the wait. `join_deadline` limits the wait for a node that has not joined.
    pub(crate) fn links(
        self,
        join_deadline: Option<JoinDeadline>,
        is_cancelled: impl FnMut() -> bool,
    ) -> Result<Option<Vec<RankLink>>, StartError> {
        let (first, node) = (self.first_rank, self.node);
        let links = wait_for_links(&self.registry, first, node, join_deadline, is_cancelled)?;
        let connect =
            |links: Vec<PendingLink>| links.into_iter().map(|link| self.connect(link)).collect();
        links.map(connect).transpose()
    }

    /// Sends the settings to an executor over its connection.
    fn connect(&self, link: PendingLink) -> Result<RankLink, StartError> {
        let PendingLink { rank, stream, host, executor } = link;
        let epoch = self.settings.epoch;
        let HostSettings {
            model_dir,
            libraries,
            kernel_cache,
            threads,
            rendezvous,
            gpus,
            host_address,
        } = host;
        let own = ExecutorSettings::clone(&self.settings);
        // Without an address, all ranks of a group are on one host.
        let host_address = own.host_address.is_some().then_some(host_address).flatten();
        let settings = ExecutorSettings {
            rank,
            model_dir,
            libraries,
            kernel_cache,
            threads,
            rendezvous,
            gpus,
            host_address,
            ..own
        };
        let mut writer = FrameWriter::new(LinkSocket::from(stream.try_clone()?), epoch);
        if let Err(error) = writer.send(settings) {
            let cause = format!("{executor}: {error}");
            return Err(StartError::Exited { phase: "start", cause });
        }
        let process: Arc<dyn ExecutorProcessHandle> = executor;
        let messages = Box::new(FrameReader::new(LinkSocket::from(stream), epoch));
        let receiver = ExecutorReceiver { messages, epoch, rank, process: Some(process) };
        Ok(RankLink { sender: writer.into_stream(), receiver })
    }
}

/// Waits until the executors of another node, from `first_rank` on, have connected; returns their connections, or
/// `None` if `is_cancelled` ends the wait. `join_deadline` limits the wait for a node that has not joined.
fn wait_for_links(
    registry: &NodeRegistry,
    first_rank: Rank,
    node: u16,
    join_deadline: Option<JoinDeadline>,
    mut is_cancelled: impl FnMut() -> bool,
) -> Result<Option<Vec<PendingLink>>, StartError> {
    let (mut is_logged, label, phase) = (false, ExecutorLabel::of_node(node), "start");
    while !is_cancelled() {
        match registry.advance_start(first_rank) {
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
                tracing::info!(node, first_rank = first_rank.0, "waiting for the node");
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
        registry.command_start(2, Epoch(1), 2..3);
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
        let Err(error) = wait_for_links(&registry, Rank(2), 2, Some(join_deadline), is_cancelled)
        else {
            panic!("linked without a node")
        };
        assert!(matches!(error, StartError::NodeMissing { node: 2, .. }), "{error}");
        assert_eq!(polls, 2, "one poll to log the wait, one to fail");
    }
}
