//! Captured steps: one recording per number of rows, replayed by every pure decode step.
//!
//! A recording has fixed addresses and a fixed number of rows; rows beyond those of its batch are
//! padding that `prepare` lays out as such. Recordings are made before the executor is ready.

use crate::ExecutorError;
use crate::step::{DeviceState, Engine};
use ops::{Graph, RowBounds, StepShape};
use protocol::StepTiming;
use std::collections::BTreeMap;

/// Rows that recordings are made for, where a step may have so many.
const ROWS: [u32; 11] = [1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512];

/// Recordings by rows.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    by_rows: BTreeMap<u32, Graph>,
}

/// Rows to capture for steps of up to `most` rows.
pub(crate) fn rows_up_to(most: usize) -> Vec<u32> {
    ROWS.into_iter().filter(|&rows| rows as usize <= most).collect()
}

impl Graphs {
    /// The recording for exactly `rows` rows.
    pub(crate) fn of(&self, rows: u32) -> Option<&Graph> {
        self.by_rows.get(&rows)
    }

    /// Row counts, ascending.
    pub(crate) fn rows(&self) -> Vec<u32> {
        self.by_rows.keys().copied().collect()
    }

    /// Records a step of each of `rows` rows with up to `longest` keys, the largest first. One that cannot be recorded is left out,
    /// and its steps run launch by launch.
    pub(crate) fn capture(
        engine: &Engine,
        device: &mut DeviceState,
        rows: &[u32],
        longest: usize,
        mut done: impl FnMut(u64),
    ) -> Self {
        let mut by_rows = BTreeMap::new();
        for (i, &rows) in (1..).zip(rows.iter().rev()) {
            match record(engine, device, rows as usize, longest) {
                Ok(graph) => drop(by_rows.insert(rows, graph)),
                Err(error) => tracing::warn!(rows, %error, "no graph for steps of so many rows"),
            }
            done(i);
        }
        Self { by_rows }
    }
}

/// A step of `rows` rows of one token each, with up to `longest` keys.
pub(crate) fn shape(rows: usize, longest: usize) -> StepShape {
    let bounds = RowBounds { decode_rows: rows, longest_q: 0, longest_context: longest };
    StepShape { tokens: rows, rows, questions: rows, bounds }
}

/// Runs a step of padding once, so that all its memory exists, then records it.
fn record(
    engine: &Engine,
    device: &mut DeviceState,
    rows: usize,
    longest: usize,
) -> Result<Graph, ExecutorError> {
    let shape = shape(rows, longest);
    let mut timing = StepTiming::default();
    let (driver, stream) = (engine.ops.device(), engine.ops.stream());
    device.launch(engine, shape, &mut timing)?;
    driver.synchronize(stream)?;
    driver.begin_capture(stream)?;
    let launched = device.launch(engine, shape, &mut timing);
    let graph = driver.end_capture(stream);
    launched?;
    Ok(graph?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_fit_the_step() {
        assert_eq!(rows_up_to(5), [1, 2, 4]);
        assert_eq!(rows_up_to(1000).last(), Some(&512));
        assert_eq!(rows_up_to(0), [0; 0]);
    }
}
