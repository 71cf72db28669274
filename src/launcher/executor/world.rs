//! All executors of a server, started together and started again group by group: one for each replica, or one for all
//! if they step together.

use super::ExecutorLink;
use super::group::{ExecutorGroup, Lifetime, TooOften};
use crate::launcher::engine_thread::Notice;
use crate::launcher::start_up::{Expected, Patience, Start, StartError, Up};
use anyhow::Result;
use executor::ExecutorConfig;
use protocol::{Epoch, Phase, Replica, Settings};
use std::ops::Range;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

/// The groups, and how long a start may take.
pub struct World {
    groups: Vec<ExecutorGroup>,
    patience: Patience,
    /// Blocks of the first start: no later one has more, so that limits stay as announced.
    blocks: Option<u32>,
}

impl World {
    /// Groups that have not started, as many as `config` says.
    pub fn new(config: &ExecutorConfig, lifetime: Lifetime, patience: Patience) -> Self {
        let parallel = config.settings.parallel;
        let each = if parallel.lockstep() { parallel.dp_size } else { 1 };
        let first = (0..parallel.dp_size).step_by(each.into());
        let group = |first| ExecutorGroup::new(config.clone(), first..first + each, lifetime);
        Self { groups: first.map(group).collect(), patience, blocks: None }
    }

    /// Numbers of the replicas whose executors live and die with those of this one.
    pub fn group_of(&self, replica: Replica) -> Range<u16> {
        self.groups[self.index_of(replica)].replicas()
    }

    fn index_of(&self, replica: Replica) -> usize {
        let holds = |group: &ExecutorGroup| group.replicas().contains(&replica.0);
        self.groups.iter().position(holds).expect("every replica is in a group")
    }

    /// What all executors are told, beside their rank.
    pub fn settings(&self) -> &Settings {
        self.groups[0].settings()
    }

    /// Starts all groups as generation `epoch`. Call it on the main thread.
    ///
    /// Errors: no process, thread or descriptor is left.
    pub fn start(&mut self, epoch: Epoch) -> Result<Vec<ExecutorLink>> {
        let mut links = Vec::new();
        for group in &mut self.groups {
            links.extend(group.start(epoch)?);
        }
        Ok(links)
    }

    /// Waits until all executors are ready; they get as many blocks as each of them can hold. `stop` says which
    /// signal has come, `progress` sees every step of the first rank's way.
    pub fn bring_up(
        &mut self,
        links: &mut [ExecutorLink],
        stop: impl Fn() -> Option<i32>,
        progress: impl FnMut(Phase, u64, u64),
    ) -> Result<Up, StartError> {
        let epoch = self.settings().epoch;
        let up = self.start_of(0, epoch).bring_up(links, |blocks| blocks, stop, progress)?;
        self.blocks = Some(up.ready.blocks);
        Ok(up)
    }

    fn start_of(&self, group: usize, epoch: Epoch) -> Start {
        let manifest = self.groups[group].manifest();
        Start { patience: self.patience, expected: Expected { epoch, manifest } }
    }

    /// Starts the executors of a replica and its group again after a loss, as generation `epoch`. `Notice::Up` says when they are
    /// ready, or that they never were. Call it on the main thread.
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
            let mut links = self.groups[group].restart(epoch, cause)?;
            let (start, notices) = (self.start_of(group, epoch), notices.clone());
            let bring_up = move || {
                let size = |blocks: u32| blocks.min(most);
                let up = start.bring_up(&mut links, size, || None, |_, _, _| {});
                let took_ms = began.elapsed().as_millis() as u64;
                if up.is_ok() {
                    tracing::info!(replica = replica.0, took_ms, "executor is back");
                }
                let outcome = up.map(|up| (links, up.ready)).map_err(|error| error.to_string());
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
    /// starting holds nothing worth waiting for.
    pub fn shut_down(&mut self, patience: Duration, is_up: impl Fn(Replica) -> bool) {
        let deadline = Instant::now() + patience;
        for group in &mut self.groups {
            if is_up(Replica(group.replicas().start)) {
                group.shut_down(deadline.saturating_duration_since(Instant::now()));
            } else {
                group.kill();
            }
        }
    }
}
