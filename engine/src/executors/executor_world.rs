//! All executors of a server, started together and started again group by group: one for each replica, here or on
//! another node, or one for all if they step together.

use super::ExecutorLink;
use super::group::{ExecutorGroup, ExecutorLaunchOptions};
use super::restart_policy::{
    FailureStage, NextStart, RestartHistory, RestartPolicy, RestartsExhausted,
};
use crate::engine_loop::{StartFailureReport, SupervisorEvent};
use crate::nodes::{AbsenceLimit, ClusterConfig, NodeRegistry, PendingRemoteStart, RemoteGroup};
use crate::startup::{
    ExecutorStartup, ExpectedExecutors, StartError, StartTimeouts, StartupReport, WeightsBaseline,
};
use anyhow::Result;
use executor::ExecutorConfig;
use metrics::StartFailure;
use protocol::{Epoch, ExecutorSettings, Replica, StartupPhase};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

/// The other nodes of a server.
#[derive(Clone)]
pub struct RemoteNodes {
    /// How many, and which replicas are theirs.
    pub cluster: ClusterConfig,
    /// Who is there.
    pub registry: Arc<NodeRegistry>,
}

/// How executors are started: how long that may take, and when it is tried again.
#[derive(Debug, Clone, Copy)]
pub struct StartPolicy {
    /// How long a start may take.
    pub timeouts: StartTimeouts,
    /// When executors that failed are started again.
    pub restarts: RestartPolicy,
    /// Seed of the jitter of pauses between starts.
    pub jitter_seed: u64,
}

/// The groups, and how long a start may take.
pub struct ExecutorWorld {
    groups: Vec<ReplicaGroup>,
    /// The failures of each group.
    histories: Vec<RestartHistory>,
    /// What the times of `histories` are counted from.
    created_at: Instant,
    remote_nodes: Option<RemoteNodes>,
    timeouts: StartTimeouts,
    /// Executors ordered from other nodes that nobody has waited for.
    pending_remote_starts: Vec<PendingRemoteStart>,
    /// Blocks of the first start: no later one has more, so that limits stay as announced.
    blocks: Option<u32>,
    /// The weights of the first start: no later one serves others.
    weights: WeightsBaseline,
}

/// Executors that live and die together.
enum ReplicaGroup {
    Local(ExecutorGroup),
    Remote(RemoteGroup),
}

/// Executors that have been started: linked, if they are of this node.
enum StartedGroup {
    Local(Vec<ExecutorLink>),
    Remote(PendingRemoteStart),
}

impl ReplicaGroup {
    /// Numbers of the replicas that these are.
    fn replicas(&self) -> Range<u16> {
        match self {
            Self::Local(group) => group.replicas(),
            Self::Remote(group) => group.replica().0..group.replica().0 + 1,
        }
    }

    fn settings(&self) -> &ExecutorSettings {
        match self {
            Self::Local(group) => group.executor_settings(),
            Self::Remote(group) => group.settings(),
        }
    }

    fn manifest(&self) -> u64 {
        match self {
            Self::Local(group) => group.manifest(),
            Self::Remote(group) => group.manifest(),
        }
    }

    fn has_ended(&self) -> bool {
        matches!(self, Self::Local(group) if group.has_ended())
    }

    /// Ends what is left of the executors.
    fn fence(&mut self) {
        match self {
            Self::Local(group) => group.fence(),
            Self::Remote(group) => group.close(),
        }
    }

    fn start(&mut self, epoch: Epoch) -> Result<StartedGroup> {
        match self {
            Self::Local(group) => group.start(epoch).map(StartedGroup::Local),
            Self::Remote(group) => Ok(StartedGroup::Remote(group.start(epoch))),
        }
    }
}

impl StartedGroup {
    /// The links, however long the other node is away.
    fn links(self) -> Result<Vec<ExecutorLink>, StartError> {
        match self {
            Self::Local(links) => Ok(links),
            Self::Remote(awaited) => {
                let gone = || {
                    let cause = "nobody waits for it any more".to_owned();
                    StartError::Exited { phase: "start", cause }
                };
                let link = awaited.link(None, || false)?.ok_or_else(gone)?;
                Ok(vec![link])
            }
        }
    }
}

impl ExecutorWorld {
    /// Groups that have not started, as many as `config` says.
    pub fn new(
        config: &ExecutorConfig,
        lifetime: ExecutorLaunchOptions,
        rules: StartPolicy,
        others: Option<RemoteNodes>,
    ) -> Self {
        let parallel = config.settings.parallel;
        let replicas = parallel.dp_size;
        let each = if parallel.lockstep() { replicas } else { 1 };
        let group = |first: u16| {
            let elsewhere = others.as_ref().and_then(|others| {
                let node = others.cluster.node_of(first, replicas);
                (node > 0).then_some((node, Arc::clone(&others.registry)))
            });
            let config = config.clone();
            match elsewhere {
                None => {
                    ReplicaGroup::Local(ExecutorGroup::new(config, first..first + each, lifetime))
                }
                // `ClusterConfig` is of replicas that share nothing.
                Some((node, registry)) => {
                    ReplicaGroup::Remote(RemoteGroup::new(config, Replica(first), node, registry))
                }
            }
        };
        let groups: Vec<ReplicaGroup> = (0..replicas).step_by(each.into()).map(group).collect();
        let StartPolicy { timeouts: patience, restarts, jitter_seed } = rules;
        let history = |group| RestartHistory::new(restarts, jitter_seed.wrapping_add(group));
        let histories = (0..groups.len() as u64).map(history).collect();
        let weights = WeightsBaseline::new(parallel);
        Self {
            groups,
            histories,
            created_at: Instant::now(),
            remote_nodes: others,
            timeouts: patience,
            pending_remote_starts: Vec::new(),
            blocks: None,
            weights,
        }
    }

    /// Numbers of the replicas whose executors live and die with those of this one.
    pub fn group_of(&self, replica: Replica) -> Range<u16> {
        self.groups[self.index_of(replica)].replicas()
    }

    fn index_of(&self, replica: Replica) -> usize {
        let holds = |group: &ReplicaGroup| group.replicas().contains(&replica.0);
        self.groups.iter().position(holds).expect("every replica is in a group")
    }

    /// What all executors are told, beside their rank and what their machine adds.
    pub fn settings(&self) -> &ExecutorSettings {
        self.groups[0].settings()
    }

    /// Starts all groups as generation `epoch`, and returns the links to those of this node, which come first. Call it
    /// on the main thread.
    ///
    /// Errors: no process, thread or descriptor is left.
    pub fn start(&mut self, epoch: Epoch) -> Result<Vec<ExecutorLink>> {
        let mut links = Vec::new();
        for group in &mut self.groups {
            match group {
                ReplicaGroup::Local(group) => links.extend(group.start(epoch)?),
                ReplicaGroup::Remote(group) => self.pending_remote_starts.push(group.start(epoch)),
            }
        }
        Ok(links)
    }

    /// Waits until all executors are ready; they get as many blocks as each of them can hold. `links` gets those to
    /// other nodes too. `stop` says which signal has come, `progress` sees every step of the first rank's way.
    pub fn bring_up(
        &mut self,
        links: &mut Vec<ExecutorLink>,
        stop: impl Fn() -> Option<i32>,
        progress: impl FnMut(StartupPhase, u64, u64),
    ) -> Result<StartupReport, StartError> {
        if let Some(number) = self.link_remote_nodes(links, &stop)? {
            return Err(StartError::Interrupted(number));
        }
        let epoch = self.settings().epoch;
        let up = self.start_config(0, epoch).bring_up(links, |blocks| blocks, stop, progress)?;
        self.blocks = Some(up.ready.kv_blocks);
        self.weights = up.weights.clone();
        Ok(up)
    }

    /// Waits for the links to other nodes. Returns the signal that has come, if one has.
    fn link_remote_nodes(
        &mut self,
        links: &mut Vec<ExecutorLink>,
        stop: &impl Fn() -> Option<i32>,
    ) -> Result<Option<i32>, StartError> {
        let mut signal = None;
        let absence = AbsenceLimit { since: Instant::now(), limit: self.timeouts.total };
        for awaited in std::mem::take(&mut self.pending_remote_starts) {
            let groups = &self.groups;
            let cut = || {
                signal = signal.or_else(stop);
                signal.is_some() || groups.iter().any(ReplicaGroup::has_ended)
            };
            match awaited.link(Some(absence), cut)? {
                Some(link) => links.push(link),
                // One of this node's has ended, and its link tells why.
                None => break,
            }
        }
        Ok(signal)
    }

    fn start_config(&self, group: usize, epoch: Epoch) -> ExecutorStartup {
        let manifest = self.groups[group].manifest();
        let expected = ExpectedExecutors { epoch, manifest };
        ExecutorStartup { timeouts: self.timeouts, expected, weights: self.weights.clone() }
    }

    /// The executors of a replica and its group have failed, because of `cause`: what is left of them is ended. Returns
    /// when they are started again. Call it on the main thread.
    ///
    /// Errors: they have failed too often, or for too long.
    pub fn failed(
        &mut self,
        replica: Replica,
        stage: FailureStage,
        cause: &str,
    ) -> Result<NextStart, RestartsExhausted> {
        let group = self.index_of(replica);
        self.groups[group].fence();
        self.histories[group].failed(stage, self.created_at.elapsed(), cause)
    }

    /// The executors of a replica and its group are ready again.
    pub fn ready(&mut self, replica: Replica) {
        let group = self.index_of(replica);
        self.histories[group].ready();
    }

    /// Starts the executors of a replica and its group again, as generation `epoch`. `SupervisorEvent::Up` says when they are
    /// ready, or that they never were. Call it on the main thread.
    ///
    /// Errors: no process, thread or descriptor is left.
    pub fn restart(
        &mut self,
        replica: Replica,
        epoch: Epoch,
        notices: &Sender<SupervisorEvent>,
    ) -> Result<(), StartFailureReport> {
        let system = |text: String| StartFailureReport { failure: StartFailure::System, text };
        let began = Instant::now();
        let group = self.index_of(replica);
        let replica = Replica(self.groups[group].replicas().start);
        let most = self.blocks.unwrap_or(u32::MAX);
        let started = self.groups[group].start(epoch);
        let started = started.map_err(|error| system(format!("{error:#}")))?;
        let (start, notices) = (self.start_config(group, epoch), notices.clone());
        let bring_up = move || {
            let up = started.links().and_then(|mut links| {
                let size = |blocks: u32| blocks.min(most);
                let up = start.bring_up(&mut links, size, || None, |_, _, _| {})?;
                Ok((links, up.ready))
            });
            let took_ms = began.elapsed().as_millis() as u64;
            if up.is_ok() {
                tracing::info!(replica = replica.0, took_ms, "executor is back");
            }
            let failed = |error: StartError| StartFailureReport {
                failure: error.failure(),
                text: error.to_string(),
            };
            // The main thread may have left already, at shutdown.
            let _ = notices.send(SupervisorEvent::StartFinished {
                replica,
                epoch,
                outcome: up.map_err(failed),
            });
        };
        let thread = thread::Builder::new().name("executor-start".to_owned()).spawn(bring_up);
        thread.map(drop).map_err(|error| system(error.to_string()))
    }

    /// Ends executors that have been told to stop; `is_up` says of which replicas there are any: what is only
    /// starting holds nothing worth waiting for. Other nodes leave with theirs.
    pub fn shut_down(&mut self, patience: Duration, is_up: impl Fn(Replica) -> bool) {
        let deadline = Instant::now() + patience;
        let left = || deadline.saturating_duration_since(Instant::now());
        if let Some(others) = &self.remote_nodes {
            others.registry.shut_down_nodes();
        }
        for group in &mut self.groups {
            let up = is_up(Replica(group.replicas().start));
            match group {
                ReplicaGroup::Local(group) if up => group.shut_down(left()),
                ReplicaGroup::Local(group) => group.kill(),
                ReplicaGroup::Remote(_) if up => {}
                ReplicaGroup::Remote(group) => group.close(),
            }
        }
        if let Some(others) = &self.remote_nodes {
            others.registry.wait_until_disconnected(left());
        }
    }
}
