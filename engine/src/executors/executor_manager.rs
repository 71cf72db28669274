//! All executors of a server. They are started together; after a failure, they are restarted by group. A
//! group contains the executors of one replica or, if the replicas run in lockstep
//! (share experts and execute each step together), the executors of all replicas. Its executors may be on several nodes.

use super::ExecutorLink;
use super::local_executors::{ExecutorLaunchOptions, LocalExecutors};
use super::replica_group::{ExecutorGroup, StartedGroup};
use super::restart_policy::{
    FailureStage, RestartAttempt, RestartHistory, RestartPolicy, RestartsExhausted,
};
use crate::engine_loop::{ExecutorRestartFailure, SupervisorEvent};
use crate::nodes::{ClusterConfig, JoinDeadline, NodeRegistry, RemoteExecutors};
use crate::startup::{
    ExecutorStartupParams, ExpectedHello, StartError, StartTimeouts, StartupReport,
    WeightsDigestBaseline,
};
use anyhow::Result;
use executor::ExecutorConfig;
use metrics::RestartFailureKind;
use protocol::{Epoch, ExecutorSettings, Replica, StartupPhase};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

/// Other nodes of a multi-node server, on which executors of this server run.
#[derive(Clone)]
pub struct RemoteNodes {
    /// Multi-node configuration, which assigns ranks to nodes.
    pub cluster: ClusterConfig,
    /// Registry of the connected nodes.
    pub registry: Arc<NodeRegistry>,
}

/// Start-up timeouts and restart limits of executors.
#[derive(Debug, Clone, Copy)]
pub struct StartPolicy {
    /// Start-up timeouts, for the first start and for restarts.
    pub timeouts: StartTimeouts,
    /// Limits and back-off of restarts after failures.
    pub restarts: RestartPolicy,
    /// Seed of the jitter of restart back-offs.
    pub jitter_seed: u64,
}

/// All executor groups of a server: starts them, restarts failed ones and shuts them down.
pub struct ExecutorManager {
    config: ExecutorConfig,
    groups: Vec<ExecutorGroup>,
    /// Failure history of each executor group in `groups`, for the restart policy.
    histories: Vec<RestartHistory>,
    /// Time from which the failure times in `histories` are measured.
    created_at: Instant,
    remote_nodes: Option<RemoteNodes>,
    timeouts: StartTimeouts,
    /// Groups whose first start has begun, and whose executors on other nodes have not connected to this node yet.
    started: Vec<StartedGroup>,
    /// Number of KV blocks that each executor allocated in the first start. Restarted executors allocate no
    /// more blocks, so that limits already reported to clients remain valid.
    blocks: Option<u32>,
    /// Digests of the weights loaded in the first start. A later start that loads other weights fails.
    weights: WeightsDigestBaseline,
}

impl ExecutorManager {
    /// Creates the executor groups of `config`, without starting executors.
    pub fn new(
        config: &ExecutorConfig,
        launch_options: ExecutorLaunchOptions,
        policy: StartPolicy,
        remote_nodes: Option<RemoteNodes>,
    ) -> Self {
        let parallel = config.settings.parallel;
        let groups = executor_groups(config, launch_options, remote_nodes.as_ref());
        let StartPolicy { timeouts, restarts, jitter_seed } = policy;
        let history = |group| RestartHistory::new(restarts, jitter_seed.wrapping_add(group));
        let histories = (0..groups.len() as u64).map(history).collect();
        let weights = WeightsDigestBaseline::new(parallel);
        Self {
            config: config.clone(),
            groups,
            histories,
            created_at: Instant::now(),
            remote_nodes,
            timeouts,
            started: Vec::new(),
            blocks: None,
            weights,
        }
    }

    /// Returns the replicas that share an executor group with `replica`, including `replica`.
    pub fn group_of(&self, replica: Replica) -> Range<u16> {
        self.groups[self.index_of(replica)].replicas.clone()
    }

    fn index_of(&self, replica: Replica) -> usize {
        let contains = |group: &ExecutorGroup| group.replicas.contains(&replica.0);
        self.groups.iter().position(contains).expect("every replica is in a group")
    }

    /// Returns the settings common to all executors, without rank and host-specific values.
    pub fn settings(&self) -> &ExecutorSettings {
        &self.config.settings
    }

    /// Starts all groups with the epoch (executor generation) `epoch`. Must be called on the main thread.
    ///
    /// Errors: no process, thread or file descriptor is available.
    pub fn start(&mut self, epoch: Epoch) -> Result<()> {
        self.config.settings.epoch = epoch;
        self.started =
            self.groups.iter_mut().map(|group| group.start(epoch)).collect::<Result<_>>()?;
        Ok(())
    }

    /// Waits until all executors are ready. Every executor allocates the same number of KV blocks: the
    /// minimum, over all executors, of the number that fits in the device memory. Appends one link per replica to `links`, also
    /// if a start fails. `stop` returns the number of a pending signal, if any; `progress`
    /// receives the startup progress of the first rank.
    pub fn bring_up(
        &mut self,
        links: &mut Vec<ExecutorLink>,
        stop: impl Fn() -> Option<i32>,
        progress: impl FnMut(StartupPhase, u64, u64),
    ) -> Result<StartupReport, StartError> {
        if let Some(number) = self.link_groups(links, &stop)? {
            return Err(StartError::Interrupted(number));
        }
        let epoch = self.settings().epoch;
        let report = self.start_config(epoch).bring_up(links, |blocks| blocks, stop, progress)?;
        self.blocks = Some(report.ready.kv_blocks);
        self.weights = report.weights.clone();
        Ok(report)
    }

    /// Waits until the executors on other nodes have connected, and appends the links of all replicas to `links`. Returns
    /// the number of a pending signal, if any.
    fn link_groups(
        &mut self,
        links: &mut Vec<ExecutorLink>,
        stop: &impl Fn() -> Option<i32>,
    ) -> Result<Option<i32>, StartError> {
        let mut signal = None;
        let join_deadline = JoinDeadline { since: Instant::now(), limit: self.timeouts.total };
        for started in std::mem::take(&mut self.started) {
            let groups = &self.groups;
            let is_cancelled = || {
                signal = signal.or_else(stop);
                signal.is_some() || groups.iter().any(ExecutorGroup::has_ended)
            };
            // If an executor has exited, the wait for other nodes ends, and the link to the executor reports the reason.
            links.extend(started.links(Some(join_deadline), is_cancelled)?);
        }
        Ok(signal)
    }

    fn start_config(&self, epoch: Epoch) -> ExecutorStartupParams {
        let expected = ExpectedHello { epoch, manifest: self.config.manifest };
        ExecutorStartupParams { timeouts: self.timeouts, expected, weights: self.weights.clone() }
    }

    /// Handles a failure, due to `cause`, in the executor group of a replica: kills the remaining executors
    /// of the group and returns when to restart the group. Must be called on the main thread.
    ///
    /// Errors: the executors have failed too often, or for too long.
    pub fn failed(
        &mut self,
        replica: Replica,
        stage: FailureStage,
        cause: &str,
    ) -> Result<RestartAttempt, RestartsExhausted> {
        let group = self.index_of(replica);
        self.groups[group].fence();
        self.histories[group].failed(stage, self.created_at.elapsed(), cause)
    }

    /// Records that the executor group of a replica is ready again, which resets the count of failed starts
    /// in the restart policy.
    pub fn ready(&mut self, replica: Replica) {
        let group = self.index_of(replica);
        self.histories[group].ready();
    }

    /// Restarts the executor group of a replica with the epoch (executor generation) `epoch`.
    /// `SupervisorEvent::StartFinished` reports the outcome. Must be called on the main thread.
    ///
    /// Errors: no process, thread or file descriptor is available.
    pub fn restart(
        &mut self,
        replica: Replica,
        epoch: Epoch,
        events: &Sender<SupervisorEvent>,
    ) -> Result<(), ExecutorRestartFailure> {
        let began = Instant::now();
        let group = self.index_of(replica);
        let replica = Replica(self.groups[group].replicas.start);
        let blocks_max = self.blocks.unwrap_or(u32::MAX);
        let started = self.groups[group].start(epoch);
        let started = started.map_err(|error| system_failure(format!("{error:#}")))?;
        let (start, events) = (self.start_config(epoch), events.clone());
        let bring_up = move || {
            let outcome = started.bring_up(start, blocks_max);
            let took_ms = began.elapsed().as_millis() as u64;
            if outcome.is_ok() {
                tracing::info!(replica = replica.0, took_ms, "executors restarted");
            }
            // The send fails if the main thread has already ended (at shutdown).
            let _ = events.send(SupervisorEvent::StartFinished {
                replica,
                epoch,
                outcome: outcome.map_err(ExecutorRestartFailure::from),
            });
        };
        let thread = thread::Builder::new().name("executor-start".to_owned()).spawn(bring_up);
        thread.map(drop).map_err(|error| system_failure(error.to_string()))
    }

    /// Waits up to `timeout` for executors that have been commanded to stop, then kills them. Groups for
    /// which `is_up` is false are still starting and are killed immediately. Other nodes are commanded to
    /// leave and stop their executors themselves.
    pub fn shut_down(&mut self, timeout: Duration, is_up: impl Fn(Replica) -> bool) {
        let deadline = Instant::now() + timeout;
        let time_left = || deadline.saturating_duration_since(Instant::now());
        if let Some(remote_nodes) = &self.remote_nodes {
            remote_nodes.registry.shut_down_nodes();
        }
        for group in &mut self.groups {
            let is_up = is_up(Replica(group.replicas.start));
            group.shut_down(time_left(), is_up);
        }
        if let Some(remote_nodes) = &self.remote_nodes {
            remote_nodes.registry.wait_until_disconnected(time_left());
        }
    }
}

/// Describes the executor groups of a server, without starting executors. Ranks are assigned to nodes in order.
fn executor_groups(
    config: &ExecutorConfig,
    launch_options: ExecutorLaunchOptions,
    remote_nodes: Option<&RemoteNodes>,
) -> Vec<ExecutorGroup> {
    let parallel = config.settings.parallel;
    let (tp_size, group_size) = (parallel.tp_size, parallel.ranks_per_group());
    let group = |first: u16| {
        let replicas = first / tp_size..(first + group_size) / tp_size;
        let mut group = ExecutorGroup { replicas, tp_size, local: None, remote: Vec::new() };
        let Some(RemoteNodes { cluster, registry }) = remote_nodes else {
            let ranks = first..first + group_size;
            group.local = Some(LocalExecutors::new(config.clone(), ranks, launch_options));
            return group;
        };
        for node in 0..cluster.nodes {
            let on_node = cluster.ranks_of(node, parallel.world_size());
            let ranks = on_node.start.max(first)..on_node.end.min(first + group_size);
            if ranks.is_empty() {
                continue;
            }
            if node == 0 {
                let local = LocalExecutors::new(config.clone(), ranks, launch_options);
                group.local = Some(local);
            } else {
                let (config, registry) = (config.clone(), Arc::clone(registry));
                group.remote.push(RemoteExecutors::new(config, ranks, node, registry));
            }
        }
        group
    };
    (0..parallel.world_size()).step_by(group_size.into()).map(group).collect()
}

/// Returns the failure of a restart for which no process, thread or file descriptor is available.
fn system_failure(text: String) -> ExecutorRestartFailure {
    ExecutorRestartFailure { failure: RestartFailureKind::System, text }
}
