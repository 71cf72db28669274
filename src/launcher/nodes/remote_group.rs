//! The ranks of a replica on another node: ordered there, linked here.

use super::order::{Arrived, Progress};
use super::registry::Registry;
use crate::launcher::executor::{ExecutorLink, Incoming, Process, outbox};
use crate::launcher::start_up::{StartError, Who};
use executor::ExecutorConfig;
use protocol::link::{FrameReader, FrameWriter, Sending, Socket};
use protocol::{Epoch, HostSettings, Rank, Replica, Settings};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a wait looks whether it is over.
const POLL: Duration = Duration::from_millis(100);
/// From an order to the links of all its executors.
const LINK_WAIT: Duration = Duration::from_secs(30);

/// What it takes to have the executors of one replica started on another node, again and again.
pub(in crate::launcher) struct RemoteGroup {
    config: ExecutorConfig,
    replica: Replica,
    node: u16,
    registry: Arc<Registry>,
}

/// Executors that have been ordered.
pub(in crate::launcher) struct Awaited {
    registry: Arc<Registry>,
    replica: Replica,
    node: u16,
    settings: Box<Settings>,
}

impl RemoteGroup {
    /// A group that has not been ordered. `config` is told to each rank, with what its machine adds.
    pub(in crate::launcher) fn new(
        config: ExecutorConfig,
        replica: Replica,
        node: u16,
        registry: Arc<Registry>,
    ) -> Self {
        Self { config, replica, node, registry }
    }

    /// Which one it is.
    pub(in crate::launcher) fn replica(&self) -> Replica {
        self.replica
    }

    /// What its executors are told, beside their rank and their machine.
    pub(in crate::launcher) fn settings(&self) -> &Settings {
        &self.config.settings
    }

    /// Digest of the model folder that its executors must confirm.
    pub(in crate::launcher) fn manifest(&self) -> u64 {
        self.config.manifest
    }

    /// Orders the executors of generation `epoch`; former ones lose their links.
    pub(in crate::launcher) fn start(&mut self, epoch: Epoch) -> Awaited {
        let settings = Settings { epoch, ..self.config.settings.clone() };
        let first = self.replica.0 * settings.parallel.tp_size;
        let ranks = (first..first + settings.parallel.tp_size).map(Rank).collect();
        self.registry.order(self.replica, self.node, epoch, ranks);
        let registry = Arc::clone(&self.registry);
        let settings = Box::new(settings);
        Awaited { registry, replica: self.replica, node: self.node, settings }
    }

    /// Takes the links away from its executors, which end with them.
    pub(in crate::launcher) fn close(&self) {
        self.registry.close(self.replica);
    }
}

/// How long nodes may be away; all of them together, whoever is waited for first.
#[derive(Debug, Clone, Copy)]
pub(in crate::launcher) struct Absence {
    pub(in crate::launcher) since: Instant,
    pub(in crate::launcher) limit: Duration,
}

impl Awaited {
    /// Waits until all have linked up; `None` = `cut` has said that there is no use in waiting. `absence` bounds how
    /// long their node may be away.
    pub(in crate::launcher) fn link(
        self,
        absence: Option<Absence>,
        cut: impl FnMut() -> bool,
    ) -> Result<Option<ExecutorLink>, StartError> {
        let links = arrivals(&self.registry, self.replica, self.node, absence, cut)?;
        links.map(|links| self.connect(links)).transpose()
    }

    /// Tells each executor its settings.
    fn connect(&self, links: Vec<Arrived>) -> Result<ExecutorLink, StartError> {
        let epoch = self.settings.epoch;
        let (mut to, mut from) = (Vec::new(), Vec::new());
        for Arrived { rank, stream, host, executor } in links {
            let HostSettings { dir, libraries, kernel_cache, threads, meeting } = host;
            let own = Settings::clone(&self.settings);
            let settings = Settings { rank, dir, libraries, kernel_cache, threads, meeting, ..own };
            let mut writer = FrameWriter::new(Socket::from(stream.try_clone()?), epoch);
            if let Err(error) = writer.send(settings) {
                let cause = format!("{executor}: {error}");
                return Err(StartError::Gone { phase: "start", cause });
            }
            to.push(writer.into_stream());
            let process: Arc<dyn Process> = executor;
            let messages = Box::new(FrameReader::new(Socket::from(stream), epoch));
            from.push(Incoming { messages, epoch, rank, process: Some(process) });
        }
        Ok(ExecutorLink { to: outbox::start(to, epoch)?, from })
    }
}

/// The links of a replica on another node, as `Awaited::link` waits for them.
fn arrivals(
    registry: &Registry,
    replica: Replica,
    node: u16,
    absence: Option<Absence>,
    mut cut: impl FnMut() -> bool,
) -> Result<Option<Vec<Arrived>>, StartError> {
    let (mut told, who, phase) = (false, Who::of_node(node), "start");
    while !cut() {
        match registry.further(replica) {
            Progress::Arrived(links) => return Ok(Some(links)),
            Progress::Failed(text) => return Err(StartError::Fault { who, phase, text }),
            Progress::Ordered(at) if at.elapsed() > LINK_WAIT => {
                return Err(StartError::Stalled { who, phase, limit: LINK_WAIT });
            }
            Progress::Ordered(_) => {}
            Progress::Absent if !told => {
                told = true;
                tracing::info!(node, replica = replica.0, "waiting for the node");
            }
            Progress::Absent => {
                let over = absence.filter(|absence| absence.since.elapsed() > absence.limit);
                if let Some(Absence { limit, .. }) = over {
                    return Err(StartError::Absent { node, limit });
                }
            }
        }
        registry.wait(POLL);
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::super::Expected;
    use super::*;
    use protocol::Parallel;
    use std::thread;

    #[test]
    fn the_second_node_has_no_time_of_its_own() {
        let parallel = Parallel { dp_size: 3, ..Parallel::default() };
        let registry = Registry::new(Expected { nodes: 3, parallel, manifest: 7 });
        registry.order(Replica(2), 2, Epoch(1), vec![Rank(2)]);
        let limit = Duration::from_secs(1);
        let absence = Absence { since: Instant::now(), limit };
        // As long as the first one took.
        while absence.since.elapsed() <= limit {
            thread::sleep(POLL);
        }
        let mut looks = 0;
        let cut = || {
            looks += 1;
            false
        };
        let Err(error) = arrivals(&registry, Replica(2), 2, Some(absence), cut) else {
            panic!("nobody has linked up")
        };
        assert!(matches!(error, StartError::Absent { node: 2, .. }), "{error}");
        assert_eq!(looks, 2, "once to say that it waits, once to give up");
    }
}
