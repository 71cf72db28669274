//! Expert load reports: routed token counts, copied from the device into step outputs.

use crate::ExecutorError;
use models::{ExpertLoad, ModelConfig};
use ops::{ExpertLoadDownload, ExpertLoadEntry, Ops};
use protocol::ExpertTokenCount;
use std::cell::Cell;

/// Replayed steps between two downloads of the counts: a download copies some tens of kilobytes after the
/// step, which is noticeable in a replayed step and negligible in an eager one.
const REPLAYS: u32 = 16;

/// Expert load counters of the rank that counts for its replica.
#[derive(Debug)]
pub(crate) struct ExpertLoadReporter {
    pub(crate) load: ExpertLoad,
    /// Replays since the last report.
    replays: Cell<u32>,
}

/// A report whose download is in flight.
#[derive(Debug)]
pub(crate) struct ExpertLoadReport(ExpertLoadDownload);

impl ExpertLoadReporter {
    /// Creates the counters for a model; `None` = the model has no experts.
    pub(crate) fn new(ops: &Ops, config: &ModelConfig) -> Result<Option<Self>, ExecutorError> {
        let load = ExpertLoad::new(ops, config)?;
        Ok(load.map(|load| Self { load, replays: Cell::new(0) }))
    }

    /// Starts a report after a step that was launched or `replayed`, if a report is due.
    pub(crate) fn begin(
        &self,
        ops: &Ops,
        replayed: bool,
    ) -> Result<Option<ExpertLoadReport>, ExecutorError> {
        let replays = if replayed { self.replays.get() + 1 } else { REPLAYS };
        self.replays.set(replays % REPLAYS);
        if replays < REPLAYS {
            return Ok(None);
        }
        Ok(self.load.take(ops)?.map(ExpertLoadReport))
    }
}

impl ExpertLoadReport {
    /// Waits for the download.
    pub(crate) fn wait(self) -> Result<Vec<ExpertTokenCount>, ExecutorError> {
        let count = |entry: ExpertLoadEntry| ExpertTokenCount {
            layer: entry.layer as u16,
            expert: entry.expert as u16,
            tokens: entry.tokens,
        };
        Ok(self.0.wait()?.into_iter().map(count).collect())
    }
}
