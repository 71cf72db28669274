//! All executors of a server, started together and started again group by group: one for each replica, here or on
//! another node, or one for all if they step together.

use super::ExecutorLink;
use super::group::{ExecutorGroup, Lifetime};
use super::restarts::{FailureStage, NextStart, RestartHistory, RestartPolicy, RestartsExhausted};
use crate::config::Cluster;
use crate::launcher::engine_thread::{FailedStart, Notice};
use crate::launcher::nodes::{Absence, Awaited, Registry, RemoteGroup};
use crate::launcher::start_up::{Expected, Patience, Start, StartError, Up, WeightsBaseline};
use crate::metrics::StartFailure;
use anyhow::Result;
use executor::ExecutorConfig;
use protocol::{Epoch, Phase, Replica, Settings};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

/// The other nodes of a server.
#[derive(Clone)]
pub struct Others {
    /// How many, and which replicas are theirs.
    pub cluster: Cluster,
    /// Who is there.
    pub registry: Arc<Registry>,
}

/// How executors are started: how long that may take, and when it is tried again.
#[derive(Debug, Clone, Copy)]
pub struct StartRules {
    /// How long a start may take.
    pub patience: Patience,
    /// When executors that failed are started again.
    pub restarts: RestartPolicy,
    /// Seed of the jitter of pauses between starts.
    pub jitter_seed: u64,
}

/// The groups, and how long a start may take.
pub struct World {
    groups: Vec<Group>,
    /// The failures of each group.
    histories: Vec<RestartHistory>,
    /// What the times of `histories` are counted from.
    began: Instant,
    others: Option<Others>,
    patience: Patience,
    /// Executors ordered from other nodes that nobody has waited for.
    awaited: Vec<Awaited>,
    /// Blocks of the first start: no later one has more, so that limits stay as announced.
    blocks: Option<u32>,
    /// The weights of the first start: no later one serves others.
    weights: WeightsBaseline,
}

/// Executors that live and die together.
enum Group {
    Here(ExecutorGroup),
    Elsewhere(RemoteGroup),
}

/// Executors that have been started: linked, if they are of this node.
enum Started {
    Here(Vec<ExecutorLink>),
    Elsewhere(Awaited),
}

impl Group {
    /// Numbers of the replicas that these are.
    fn replicas(&self) -> Range<u16> {
        match self {
            Self::Here(group) => group.replicas(),
            Self::Elsewhere(group) => group.replica().0..group.replica().0 + 1,
        }
    }

    fn settings(&self) -> &Settings {
        match self {
            Self::Here(group) => group.settings(),
            Self::Elsewhere(group) => group.settings(),
        }
    }

    fn manifest(&self) -> u64 {
        match self {
            Self::Here(group) => group.manifest(),
            Self::Elsewhere(group) => group.manifest(),
        }
    }

    fn has_ended(&self) -> bool {
        matches!(self, Self::Here(group) if group.has_ended())
    }

    /// Ends what is left of the executors.
    fn fence(&mut self) {
        match self {
            Self::Here(group) => group.fence(),
            Self::Elsewhere(group) => group.close(),
        }
    }

    fn start(&mut self, epoch: Epoch) -> Result<Started> {
        match self {
            Self::Here(group) => group.start(epoch).map(Started::Here),
            Self::Elsewhere(group) => Ok(Started::Elsewhere(group.start(epoch))),
        }
    }
}

impl Started {
    /// The links, however long the other node is away.
    fn links(self) -> Result<Vec<ExecutorLink>, StartError> {
        match self {
            Self::Here(links) => Ok(links),
            Self::Elsewhere(awaited) => {
                let gone = || {
                    let cause = "nobody waits for it any more".to_owned();
                    StartError::Gone { phase: "start", cause }
                };
                let link = awaited.link(None, || false)?.ok_or_else(gone)?;
                Ok(vec![link])
            }
        }
    }
}

impl World {
    /// Groups that have not started, as many as `config` says.
    pub fn new(
        config: &ExecutorConfig,
        lifetime: Lifetime,
        rules: StartRules,
        others: Option<Others>,
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
                None => Group::Here(ExecutorGroup::new(config, first..first + each, lifetime)),
                // `Cluster` is of replicas that share nothing.
                Some((node, registry)) => {
                    Group::Elsewhere(RemoteGroup::new(config, Replica(first), node, registry))
                }
            }
        };
        let groups: Vec<Group> = (0..replicas).step_by(each.into()).map(group).collect();
        let StartRules { patience, restarts, jitter_seed } = rules;
        let history = |group| RestartHistory::new(restarts, jitter_seed.wrapping_add(group));
        let histories = (0..groups.len() as u64).map(history).collect();
        let weights = WeightsBaseline::new(parallel);
        Self {
            groups,
            histories,
            began: Instant::now(),
            others,
            patience,
            awaited: Vec::new(),
            blocks: None,
            weights,
        }
    }

    /// Numbers of the replicas whose executors live and die with those of this one.
    pub fn group_of(&self, replica: Replica) -> Range<u16> {
        self.groups[self.index_of(replica)].replicas()
    }

    fn index_of(&self, replica: Replica) -> usize {
        let holds = |group: &Group| group.replicas().contains(&replica.0);
        self.groups.iter().position(holds).expect("every replica is in a group")
    }

    /// What all executors are told, beside their rank and what their machine adds.
    pub fn settings(&self) -> &Settings {
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
                Group::Here(group) => links.extend(group.start(epoch)?),
                Group::Elsewhere(group) => self.awaited.push(group.start(epoch)),
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
        progress: impl FnMut(Phase, u64, u64),
    ) -> Result<Up, StartError> {
        if let Some(number) = self.link_others(links, &stop)? {
            return Err(StartError::Signal(number));
        }
        let epoch = self.settings().epoch;
        let up = self.start_of(0, epoch).bring_up(links, |blocks| blocks, stop, progress)?;
        self.blocks = Some(up.ready.blocks);
        self.weights = up.weights.clone();
        Ok(up)
    }

    /// Waits for the links to other nodes. Returns the signal that has come, if one has.
    fn link_others(
        &mut self,
        links: &mut Vec<ExecutorLink>,
        stop: &impl Fn() -> Option<i32>,
    ) -> Result<Option<i32>, StartError> {
        let mut signal = None;
        let absence = Absence { since: Instant::now(), limit: self.patience.total };
        for awaited in std::mem::take(&mut self.awaited) {
            let groups = &self.groups;
            let cut = || {
                signal = signal.or_else(stop);
                signal.is_some() || groups.iter().any(Group::has_ended)
            };
            match awaited.link(Some(absence), cut)? {
                Some(link) => links.push(link),
                // One of this node's has ended, and its link tells why.
                None => break,
            }
        }
        Ok(signal)
    }

    fn start_of(&self, group: usize, epoch: Epoch) -> Start {
        let manifest = self.groups[group].manifest();
        let expected = Expected { epoch, manifest };
        Start { patience: self.patience, expected, weights: self.weights.clone() }
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
        self.histories[group].failed(stage, self.began.elapsed(), cause)
    }

    /// The executors of a replica and its group are ready again.
    pub fn ready(&mut self, replica: Replica) {
        let group = self.index_of(replica);
        self.histories[group].ready();
    }

    /// Starts the executors of a replica and its group again, as generation `epoch`. `Notice::Up` says when they are
    /// ready, or that they never were. Call it on the main thread.
    ///
    /// Errors: no process, thread or descriptor is left.
    pub fn restart(
        &mut self,
        replica: Replica,
        epoch: Epoch,
        notices: &Sender<Notice>,
    ) -> Result<(), FailedStart> {
        let system = |text: String| FailedStart { failure: StartFailure::System, text };
        let began = Instant::now();
        let group = self.index_of(replica);
        let replica = Replica(self.groups[group].replicas().start);
        let most = self.blocks.unwrap_or(u32::MAX);
        let started = self.groups[group].start(epoch);
        let started = started.map_err(|error| system(format!("{error:#}")))?;
        let (start, notices) = (self.start_of(group, epoch), notices.clone());
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
            let failed = |error: StartError| FailedStart {
                failure: error.failure(),
                text: error.to_string(),
            };
            // The main thread may have left already, at shutdown.
            let _ = notices.send(Notice::Up { replica, epoch, outcome: up.map_err(failed) });
        };
        let thread = thread::Builder::new().name("executor-start".to_owned()).spawn(bring_up);
        thread.map(drop).map_err(|error| system(error.to_string()))
    }

    /// Ends executors that have been told to stop; `is_up` says of which replicas there are any: what is only
    /// starting holds nothing worth waiting for. Other nodes leave with theirs.
    pub fn shut_down(&mut self, patience: Duration, is_up: impl Fn(Replica) -> bool) {
        let deadline = Instant::now() + patience;
        let left = || deadline.saturating_duration_since(Instant::now());
        if let Some(others) = &self.others {
            others.registry.dismiss();
        }
        for group in &mut self.groups {
            let up = is_up(Replica(group.replicas().start));
            match group {
                Group::Here(group) if up => group.shut_down(left()),
                Group::Here(group) => group.kill(),
                Group::Elsewhere(_) if up => {}
                Group::Elsewhere(group) => group.close(),
            }
        }
        if let Some(others) = &self.others {
            others.registry.wait_empty(left());
        }
    }
}
