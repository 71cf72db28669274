//! All executors of a server, started together and started again group by group: one for each replica, here or on
//! another node, or one for all if they step together.

use super::ExecutorLink;
use super::group::{ExecutorGroup, Lifetime};
use super::restarts::TooOften;
use crate::config::Cluster;
use crate::launcher::engine_thread::Notice;
use crate::launcher::nodes::{Absence, Awaited, Registry, RemoteGroup};
use crate::launcher::start_up::{Expected, Patience, Start, StartError, Up};
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

/// The groups, and how long a start may take.
pub struct World {
    groups: Vec<Group>,
    others: Option<Others>,
    patience: Patience,
    /// Executors ordered from other nodes that nobody has waited for.
    awaited: Vec<Awaited>,
    /// Blocks of the first start: no later one has more, so that limits stay as announced.
    blocks: Option<u32>,
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

    fn restart(&mut self, epoch: Epoch, cause: String) -> Result<Started, TooOften> {
        match self {
            Self::Here(group) => group.restart(epoch, cause).map(Started::Here),
            Self::Elsewhere(group) => group.restart(epoch, &cause).map(Started::Elsewhere),
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
        patience: Patience,
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
        let groups = (0..replicas).step_by(each.into()).map(group).collect();
        Self { groups, others, patience, awaited: Vec::new(), blocks: None }
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
        Start { patience: self.patience, expected: Expected { epoch, manifest } }
    }

    /// Starts the executors of a replica and its group again after a loss, as generation `epoch`. `Notice::Up` says
    /// when they are ready, or that they never were. Call it on the main thread.
    ///
    /// Errors: they were lost too often.
    pub fn restart(
        &mut self,
        replica: Replica,
        epoch: Epoch,
        mut cause: String,
        notices: &Sender<Notice>,
    ) -> Result<(), TooOften> {
        let began = Instant::now();
        let group = self.index_of(replica);
        let replica = Replica(self.groups[group].replicas().start);
        let most = self.blocks.unwrap_or(u32::MAX);
        loop {
            let started = self.groups[group].restart(epoch, cause)?;
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
                let outcome = up.map_err(|error| error.to_string());
                // The main thread may have left already, at shutdown.
                let _ = notices.send(Notice::Up { replica, epoch, outcome });
            };
            match thread::Builder::new().name("executor-start".to_owned()).spawn(bring_up) {
                Ok(_) => return Ok(()),
                Err(error) => cause = error.to_string(),
            }
        }
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
