//! Expert load reports: the number of tokens routed to each expert, downloaded from the device and returned
//! in step outputs.

use crate::ExecutorError;
use models::{ExpertLoadStats, ModelConfig};
use ops::{ExpertLoadEntry, ExpertLoadStatsDownload, Ops};
use protocol::ExpertTokenCount;
use std::cell::Cell;

/// Number of captured-graph replays per download of the expert token counts. A download copies some tens of
/// kilobytes after the step. The time of this copy is noticeable compared with a replayed step, and
/// negligible compared with an eager step.
const REPLAYS: u32 = 16;

/// Reports how many tokens were routed to each expert, from counters on the device. Only one rank of each
/// replica has a reporter.
#[derive(Debug)]
pub(crate) struct ExpertLoadReporter {
    pub(crate) load: ExpertLoadStats,
    /// Number of steps that replayed a captured graph since the counts were last downloaded.
    replays: Cell<u32>,
}

/// An expert load report (number of tokens routed to each expert) that is being downloaded from the device.
#[derive(Debug)]
pub(crate) struct PendingExpertLoadReport(ExpertLoadStatsDownload);

impl ExpertLoadReporter {
    /// Creates the counters for the experts of a model; `None` = the model has no experts.
    pub(crate) fn new(ops: &Ops, config: &ModelConfig) -> Result<Option<Self>, ExecutorError> {
        let load = ExpertLoadStats::new(ops, config)?;
        Ok(load.map(|load| Self { load, replays: Cell::new(0) }))
    }

    /// Starts a download of the counts after a step, if a download is due: after every eager step, and after
    /// every `REPLAYS` replays of captured graphs.
    pub(crate) fn begin(
        &self,
        ops: &Ops,
        replayed: bool,
    ) -> Result<Option<PendingExpertLoadReport>, ExecutorError> {
        let replays = if replayed { self.replays.get() + 1 } else { REPLAYS };
        self.replays.set(replays % REPLAYS);
        if replays < REPLAYS {
            return Ok(None);
        }
        Ok(self.load.take(ops)?.map(PendingExpertLoadReport))
    }
}

impl PendingExpertLoadReport {
    /// Waits for the download and returns the number of tokens routed to each expert.
    pub(crate) fn wait(self) -> Result<Vec<ExpertTokenCount>, ExecutorError> {
        let count = |entry: ExpertLoadEntry| ExpertTokenCount {
            layer: entry.layer as u16,
            expert: entry.expert as u16,
            tokens: entry.tokens,
        };
        Ok(self.0.wait()?.into_iter().map(count).collect())
    }
}
