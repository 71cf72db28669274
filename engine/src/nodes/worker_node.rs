//! Worker node (any node other than node 0, which runs the scheduler): joins node 0, starts executors when
//! node 0 commands it, and ends when node 0 ends.
//!
//! A worker node serves no clients. Its executors communicate with node 0 directly. When the heartbeat of
//! node 0 times out, the executors end, because by then node 0 has marked them as failed and continues
//! without them.

use super::cluster::{ClusterConfig, ClusterSecret};
use super::dial::NodeDialer;
use super::node_zero_connection::NodeZeroConnection;
use crate::executors::{
    ExecutorLaunchOptions, ExecutorProcess, ExecutorProcessHandle, LocalExecutors,
};
use anyhow::{Context, Result};
use executor::ExecutorConfig;
use protocol::{
    Epoch, ExecutorLinkRequest, ExecutorSettings, HostSettings, NodeCommand, NodeEvent, NodeInfo,
    Rank,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum duration of the retries to connect one executor to node 0. It is longer than the time that node 0
/// allows for the handshake of a connection, and shorter than the time that node 0 waits for the executor to
/// connect. During the retries, this node handles no other commands.
const LINK_TIME: Duration = Duration::from_secs(6);
/// Maximum wait until the executors have finished their last step after node 0 has commanded them to stop.
const EXECUTOR_WAIT: Duration = Duration::from_secs(5);
/// Timeout of each wait for an event, which limits the delay if a wake-up is missed.
const PROCESS_WAIT_MAX: Duration = Duration::from_hours(1);

/// Event for the main thread of a worker node.
#[derive(Debug)]
pub enum WorkerNodeEvent {
    /// The process received this signal.
    Signal(i32),
    /// Node 0 sent this command.
    NodeZeroCommand(NodeCommand),
    /// The connection to node 0 failed. Carries a description of the failure.
    Disconnected(String),
}

/// Reason why a worker node ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerNodeExit {
    /// Node 0 has ended the service, or this node left after a signal while node 0 continued.
    Left,
    /// A second signal was received before node 0 ended.
    SecondSignal(i32),
    /// The connection to node 0 failed.
    Disconnected,
}

/// Configuration that a worker node needs to join a cluster.
pub struct WorkerNodeConfig {
    /// Cluster configuration on this node.
    pub cluster: ClusterConfig,
    /// Shared secret of the cluster.
    pub secret: ClusterSecret,
    /// Executor settings, without the values that depend on the rank or are set by node 0.
    pub config: ExecutorConfig,
    /// Whether executors are processes, and how processes are launched.
    pub launch_options: ExecutorLaunchOptions,
    /// Maximum wait for node 0 at start-up.
    pub startup_timeout: Duration,
}

/// Returns the description of this node for its join request.
fn node_info(cluster: &ClusterConfig, config: &ExecutorConfig) -> NodeInfo {
    NodeInfo {
        node: cluster.node,
        nodes: cluster.nodes,
        parallel: config.settings.parallel,
        build: env!("CARGO_PKG_VERSION").to_owned(),
        model_digest: config.manifest,
    }
}

/// Returns the executor settings that depend on this node.
fn host_settings(
    settings: ExecutorSettings,
    rendezvous: Option<PathBuf>,
    host_address: &str,
) -> HostSettings {
    HostSettings {
        model_dir: settings.model_dir,
        libraries: settings.libraries,
        kernel_cache: settings.kernel_cache,
        threads: settings.threads,
        rendezvous,
        gpus: settings.gpus,
        host_address: Some(host_address.to_owned()),
    }
}

/// Worker node that has joined a cluster.
pub struct WorkerNode {
    node: u16,
    config: ExecutorConfig,
    launch_options: ExecutorLaunchOptions,
    dialer: NodeDialer,
    node_zero: SyncSender<NodeEvent>,
    /// Name or address at which the ranks of other nodes reach those of this node.
    address: String,
    /// Executors of each group, by the first rank.
    groups: BTreeMap<u16, LocalExecutors>,
}

impl WorkerNode {
    /// Connects to node 0, waits until node 0 accepts this node and starts the threads of the connection,
    /// which send events to `sender`. Returns `None` if a signal is received first.
    ///
    /// Errors: node 0 is not reachable in time, belongs to another cluster, or rejects this node.
    pub fn join(
        setup: WorkerNodeConfig,
        sender: Sender<WorkerNodeEvent>,
        events: &Receiver<WorkerNodeEvent>,
    ) -> Result<Option<Self>> {
        let WorkerNodeConfig { cluster, secret, config, launch_options, startup_timeout } = setup;
        let dialer = NodeDialer::new(&cluster, secret);
        let info = node_info(&cluster, &config);
        let Some(accepted) = NodeZeroConnection::join(&dialer, &info, startup_timeout, events)?
        else {
            return Ok(None);
        };
        let address = match cluster.node_address {
            Some(address) => address,
            None => accepted.local_address()?.to_string(),
        };
        let node_zero = accepted.start(sender)?;
        Ok(Some(Self {
            config,
            launch_options,
            dialer,
            node_zero,
            address,
            groups: BTreeMap::new(),
            node: cluster.node,
        }))
    }

    /// Executes the commands of node 0. Returns when node 0 commands this node to leave, or when the
    /// connection to node 0 fails. After SIGTERM or SIGINT, this node continues until node 0 ends, but at
    /// most for `timeout`.
    pub fn serve(
        &mut self,
        events: &Receiver<WorkerNodeEvent>,
        timeout: Duration,
    ) -> WorkerNodeExit {
        tracing::info!(node = self.node, "joined; node 0 schedules and serves clients");
        let mut drain_deadline: Option<Instant> = None;
        loop {
            let time_left = drain_deadline
                .map_or(PROCESS_WAIT_MAX, |at| at.saturating_duration_since(Instant::now()));
            match events.recv_timeout(time_left) {
                Ok(WorkerNodeEvent::NodeZeroCommand(NodeCommand::Start {
                    first_rank,
                    count,
                    epoch,
                    ticket,
                })) => {
                    self.start(first_rank.0..first_rank.0 + count, epoch, ticket);
                }
                Ok(WorkerNodeEvent::NodeZeroCommand(NodeCommand::Leave)) => {
                    tracing::info!("node 0 has shut down");
                    self.shut_down_executors();
                    return WorkerNodeExit::Left;
                }
                Ok(WorkerNodeEvent::Signal(number)) if drain_deadline.is_some() => {
                    return WorkerNodeExit::SecondSignal(number);
                }
                Ok(WorkerNodeEvent::Signal(number)) => {
                    tracing::info!(number, "waiting until node 0 has drained");
                    drain_deadline = Some(Instant::now() + timeout);
                }
                Ok(WorkerNodeEvent::Disconnected(cause)) => {
                    tracing::error!(cause, "connection to node 0 failed: exiting");
                    self.groups.values_mut().for_each(LocalExecutors::kill);
                    return WorkerNodeExit::Disconnected;
                }
                Err(RecvTimeoutError::Timeout) if drain_deadline.is_some() => {
                    tracing::warn!("node 0 did not shut down in time: leaving");
                    return WorkerNodeExit::Left;
                }
                // Ignore heartbeats and replies to the join request, which has already been accepted.
                Ok(WorkerNodeEvent::NodeZeroCommand(_)) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return WorkerNodeExit::Disconnected,
            }
        }
    }

    /// Starts the executors with the world ranks `ranks`, after stopping any running executors with these ranks.
    fn start(&mut self, ranks: Range<u16>, epoch: Epoch, ticket: u64) {
        let (config, launch_options) = (&self.config, self.launch_options);
        let (first_rank, address) = (ranks.start, &self.address);
        let new_group = || LocalExecutors::new(config.clone(), ranks, launch_options);
        let group = self.groups.entry(first_rank).or_insert_with(new_group);
        let dial = |rank: Rank, rendezvous| {
            let host = host_settings(config.settings.clone(), rendezvous, address);
            let offer = ExecutorLinkRequest { ticket, rank, host };
            Ok(self.dialer.connect_with_retries(&NodeEvent::Link(offer), LINK_TIME)?)
        };
        tracing::info!(first_rank, epoch = epoch.0, "starting executors");
        let started = group.start_linked(epoch, dial).and_then(|started| {
            started.into_iter().try_for_each(|(rank, process)| {
                report_exit(rank, epoch, process, self.node_zero.clone())
                    .context("no thread is available")
            })
        });
        if let Err(error) = started {
            group.kill();
            let text = format!("{error:#}");
            tracing::error!(text, "cannot start the executors");
            // The send fails if the connection to node 0 has failed.
            let _ = self.node_zero.send(NodeEvent::StartFailed { ticket, reason: text });
        }
    }

    /// Waits until the executors, which node 0 has commanded to stop, have ended.
    fn shut_down_executors(&mut self) {
        let deadline = Instant::now() + EXECUTOR_WAIT;
        for group in self.groups.values_mut() {
            group.shut_down(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

/// Starts the thread that reports the exit of an executor to node 0.
fn report_exit(
    rank: Rank,
    epoch: Epoch,
    process: Arc<ExecutorProcess>,
    node_zero: SyncSender<NodeEvent>,
) -> std::io::Result<()> {
    let waiter = thread::Builder::new().name("executor-end".to_owned());
    let started = waiter.spawn(move || {
        while process.wait(PROCESS_WAIT_MAX).is_none() {}
        let description = process.exit_reason();
        tracing::info!(rank = rank.0, epoch = epoch.0, description, "executor ended");
        let _ = node_zero.send(NodeEvent::ExecutorExited { rank, epoch, description });
    });
    started.map(drop)
}
