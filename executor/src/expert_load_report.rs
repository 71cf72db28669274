//! What routers choose, on its way from the device to the outputs of steps.

use crate::ExecutorError;
use models::{ExpertLoad, ModelConfig};
use ops::{ExpertLoadDownload, Ops};
use protocol::ExpertTokenCount;
use std::cell::Cell;

/// Steps that are replayed one after another before the numbers are brought to the host: it takes a copy of some tens of
/// kilobytes behind a step, which is nothing beside one that is launched.
const REPLAYS: u32 = 16;

/// The numbers of a rank that counts for its replica.
#[derive(Debug)]
pub(crate) struct ExpertLoadReporter {
    pub(crate) load: ExpertLoad,
    /// Replays since the last report.
    replays: Cell<u32>,
}

/// A report under way.
#[derive(Debug)]
pub(crate) struct ExpertLoadReport(ExpertLoadDownload);

impl ExpertLoadReporter {
    /// For the experts of a model; `None` = it has none.
    pub(crate) fn new(ops: &Ops, config: &ModelConfig) -> Result<Option<Self>, ExecutorError> {
        let load = ExpertLoad::new(ops, config)?;
        Ok(load.map(|load| Self { load, replays: Cell::new(0) }))
    }

    /// Begins a report behind a step that has been launched or `replayed`, if it is time for one.
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
    /// Waits for the numbers.
    pub(crate) fn wait(self) -> Result<Vec<ExpertTokenCount>, ExecutorError> {
        let tokens = |(layer, expert, tokens)| ExpertTokenCount {
            layer: layer as u16,
            expert: expert as u16,
            tokens,
        };
        Ok(self.0.wait()?.into_iter().map(tokens).collect())
    }
}
