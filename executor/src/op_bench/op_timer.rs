//! Measures the time of a launch with event timestamps of the device.

use std::sync::Arc;
use std::time::Instant;

use ops::{CapturedGraph, OpError, Ops};

use crate::ExecutorError;

/// Minimum duration of a timed run in seconds, unless the run would need more than `RUN_LAUNCHES_MAX`
/// launches.
const RUN_SECONDS: f64 = 0.004;
/// Maximum number of launches in a timed run. A captured graph contains all launches of a run.
const RUN_LAUNCHES_MAX: usize = 1024;

/// Times runs of launches with a pair of event timestamps.
#[derive(Debug)]
pub(super) struct OpTimer {
    timestamps: Arc<dyn device::TimestampEvents>,
    repeats: u32,
}

impl OpTimer {
    pub(super) fn new(ops: &Ops, repeats: u32) -> Result<Self, ExecutorError> {
        Ok(Self { timestamps: ops.device().alloc_timestamps(2)?, repeats })
    }

    /// Returns the seconds of one launch, one entry per timed run. On a GPU the launches are replayed as a
    /// captured graph, so that the time the host needs for a launch is not counted.
    pub(super) fn time(
        &self,
        ops: &Ops,
        copies: usize,
        launch: &mut dyn FnMut(usize) -> Result<(), OpError>,
    ) -> Result<Vec<f64>, ExecutorError> {
        let (device, stream) = (ops.device(), ops.stream());
        // A round is one launch per copy of the weights or KV blocks. The first round compiles kernels and
        // allocates memory; the time of the second round determines the number of rounds in a timed run.
        run(copies, 1, launch)?;
        device.synchronize(stream)?;
        let started = Instant::now();
        run(copies, 1, launch)?;
        device.synchronize(stream)?;
        let rounds = rounds(started.elapsed().as_secs_f64(), copies);
        let graph = if device.captures_graphs() {
            Some(capture(ops, || run(copies, rounds, launch))?)
        } else {
            None
        };
        let mut seconds = Vec::new();
        for _ in 0..self.repeats {
            let run_seconds = self.run_seconds(ops, || match &graph {
                Some(graph) => Ok(device.replay(stream, graph)?),
                None => Ok(run(copies, rounds, launch)?),
            })?;
            seconds.push(run_seconds / (rounds * copies) as f64);
        }
        Ok(seconds)
    }

    /// Returns the seconds that the device needs for the launches of one timed run.
    fn run_seconds(
        &self,
        ops: &Ops,
        launch_run: impl FnOnce() -> Result<(), ExecutorError>,
    ) -> Result<f64, ExecutorError> {
        self.timestamps.record(ops.stream(), 0)?;
        launch_run()?;
        self.timestamps.record(ops.stream(), 1)?;
        self.timestamps.wait(1)?;
        Ok(self.timestamps.elapsed_ns(0, 1)? as f64 / 1e9)
    }
}

/// Number of rounds (one launch per copy) in a timed run, given the seconds of one round.
fn rounds(round_seconds: f64, copies: usize) -> usize {
    let needed = (RUN_SECONDS / round_seconds.max(1e-9)).ceil() as usize;
    needed.min(RUN_LAUNCHES_MAX / copies).max(1)
}

fn run(
    copies: usize,
    rounds: usize,
    launch: &mut dyn FnMut(usize) -> Result<(), OpError>,
) -> Result<(), OpError> {
    (0..rounds).try_for_each(|_| (0..copies).try_for_each(&mut *launch))
}

/// Captures the ops that the closure `launches` launches, as a graph. The capture is ended even if a launch
/// fails.
fn capture(
    ops: &Ops,
    launches: impl FnOnce() -> Result<(), OpError>,
) -> Result<CapturedGraph, ExecutorError> {
    let (device, stream) = (ops.device(), ops.stream());
    device.begin_capture(stream)?;
    let launched = launches();
    let graph = device.end_capture(stream);
    launched?;
    Ok(graph?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timed_runs_are_long_enough_and_bounded() {
        assert_eq!(rounds(0.0004, 4), 10, "ten rounds of 0.4 ms make 4 ms");
        assert_eq!(rounds(1.0, 4), 1, "one round is long enough");
        assert_eq!(rounds(1e-9, 100), 10, "at most 1,024 launches");
        assert_eq!(rounds(0.0, 5000), 1, "at least one round");
    }
}
