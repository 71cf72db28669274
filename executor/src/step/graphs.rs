//! Captured graphs (CUDA graphs, HIP graphs) of decode steps. There is one graph per captured row count; pure
//! decode steps replay these graphs. If traces may be recorded, each row count also has an instrumented
//! graph, with event timestamps between its launches. The row count 1 has two graphs: one for short contexts
//! and one for any context. With vocab-parallel logits, each graph has a variant for steps that need full
//! rows of logits, because sizes of collectives are fixed in a graph. Rows with draft tokens are split into
//! one-token rows, so they replay the graph for that number of one-token rows.
//!
//! A graph has fixed addresses and a fixed number of rows. If the batch has fewer rows, `prepare` adds
//! padding rows. Graphs are captured before the executor is ready.

use super::launch::{StepDeviceState, StepLaunchOptions};
use crate::ExecutorError;
use crate::model_context::ModelContext;
use crate::trace::{DeviceSpan, SpanRecorder, StepTracer};
use collectives::{CollectiveCall, ParallelGroup};
use ops::{BatchRowLengths, BatchUpperBounds, CapturedGraph, ReplayShape, StepShape};
use protocol::{GraphCaptureConfig, StepTiming};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Default row counts of captured graphs. Counts above the maximum number of rows per step are not captured.
const ROWS: [u32; 11] = [1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512];

/// All captured graphs of an executor, by graph key.
#[derive(Debug, Default)]
pub(crate) struct StepGraphs {
    by_key: BTreeMap<StepGraphKey, StepGraph>,
    /// Row counts of batches for which a graph exists, ascending.
    rows: Vec<u32>,
}

/// Selection of the graphs to capture.
#[derive(Debug, Clone, Default)]
pub(crate) struct GraphCapturePlan {
    /// Row counts of the batches to capture graphs for, ascending.
    pub(crate) rows: Vec<u32>,
    /// Maximum number of tokens in a decode row: the input token and the draft tokens.
    pub(crate) tokens_per_row: u32,
    /// Whether graphs for rows without draft tokens are captured as well. Rows without draft tokens replay
    /// such a graph faster.
    pub(crate) also_without_drafts: bool,
    /// Requests whose recurrent states are updated after sampling; default = none.
    pub(crate) replay: ReplayCaptureLimits,
}

/// Bounds of the number of requests in a graph whose recurrent states are updated after their draft tokens have been
/// verified.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReplayCaptureLimits {
    /// Minimum number of one-token rows per request with draft tokens; 0 = there are no such requests.
    pub(crate) width: usize,
    /// Maximum number of requests of a step.
    pub(crate) requests: usize,
}

/// Key of a captured graph: the properties of the steps that may replay it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StepGraphKey {
    /// Whether the graph all-gathers full rows of logits from the ranks before it samples.
    full_logits: bool,
    /// Number of one-token rows that a replay computes, including padding rows.
    pub(crate) rows: u32,
    /// Maximum number of keys that a row attends to.
    context: usize,
}

/// Collectives in a captured graph: first the collectives of the TP group, then the collectives of the DP
/// group.
pub(crate) type CapturedCollectives = [Vec<CollectiveCall>; 2];

/// The launches of one captured run of a step.
struct LaunchCapture {
    graph: CapturedGraph,
    collectives: CapturedCollectives,
}

/// A captured graph of a step, with its collectives.
#[derive(Debug)]
pub(crate) struct StepGraph {
    pub(crate) graph: CapturedGraph,
    /// Collectives that each replay of the graph runs.
    pub(crate) collectives: CapturedCollectives,
    /// Variant of the graph with event timestamps between its launches, and the span (part of the step) that
    /// ends at each timestamp.
    pub(crate) instrumented: Option<(CapturedGraph, Arc<[DeviceSpan]>)>,
}

/// Returns the row counts to capture graphs for, ascending; steps have up to `max_rows` rows.
pub(crate) fn row_counts_to_capture(capture: &GraphCaptureConfig, max_rows: usize) -> Vec<u32> {
    let (rows, max_rows) = match capture {
        GraphCaptureConfig::Disabled => (&[][..], 0),
        GraphCaptureConfig::DefaultSizes { max_size } => {
            (&ROWS[..], max_size.map_or(max_rows, |max| max_rows.min(max as usize)))
        }
        GraphCaptureConfig::Sizes(rows) => (&rows[..], max_rows),
    };
    let fitting = rows.iter().copied().filter(|&rows| (1..=max_rows).contains(&(rows as usize)));
    fitting.collect::<BTreeSet<_>>().into_iter().collect()
}

impl StepGraphs {
    /// Returns the key of the smallest graph whose row count is in `rows` and that supports contexts of
    /// `context` keys.
    pub(crate) fn smallest_key(
        &self,
        full_logits: bool,
        rows: RangeInclusive<u32>,
        context: usize,
    ) -> Option<StepGraphKey> {
        smallest_fitting(&self.by_key, full_logits, rows, context)
    }

    /// Returns the graph for a key that `smallest_key` returned.
    pub(crate) fn get(&self, key: StepGraphKey) -> Option<&StepGraph> {
        self.by_key.get(&key)
    }

    /// Returns the row counts of batches for which a graph exists, ascending.
    pub(crate) fn rows(&self) -> Vec<u32> {
        self.rows.clone()
    }

    /// Captures a step of each shape in `shapes`, the largest first. If a capture fails, there is no graph
    /// for the shape, and steps of this shape are launched eagerly.
    pub(crate) fn capture(
        model: &ModelContext,
        device: &mut StepDeviceState,
        plan: &GraphCapturePlan,
        shapes: &[StepShape],
        tracer: Option<&StepTracer>,
        mut done: impl FnMut(u64),
    ) -> Self {
        let mut by_key = BTreeMap::new();
        for (i, &shape) in (1..).zip(shapes.iter().rev()) {
            let (rows, context) = (shape.rows as u32, shape.bounds.max_context_len);
            let drafting =
                device.drafts.is_some().then(|| shape.rows / plan.tokens_per_row as usize);
            for &full_logits in model.full_logits_variants() {
                let launch = StepLaunchOptions::uniform(shape, full_logits, drafting, model);
                let key = StepGraphKey { full_logits, rows, context };
                match capture_step(model, device, launch, tracer) {
                    Ok(graph) => drop(by_key.insert(key, graph)),
                    Err(error) => {
                        tracing::warn!(rows, %error, "no captured graph for steps of this number of rows");
                    }
                }
            }
            done(i);
        }
        let is_captured =
            |&rows: &u32| by_key.keys().any(|key| key.rows == rows * plan.tokens_per_row);
        let rows = plan.rows.iter().copied().filter(is_captured).collect();
        Self { by_key, rows }
    }
}

fn smallest_fitting<R>(
    by_key: &BTreeMap<StepGraphKey, R>,
    full_logits: bool,
    rows: RangeInclusive<u32>,
    context: usize,
) -> Option<StepGraphKey> {
    let from = StepGraphKey { full_logits, rows: *rows.start(), context: 0 };
    let to = StepGraphKey { full_logits, rows: *rows.end(), context: usize::MAX };
    by_key.range(from..=to).map(|(key, _)| *key).find(|key| key.context >= context)
}

/// Shape of a decode step of `rows` one-token rows with up to `longest` keys each. Up to `rows_per_request`
/// rows may belong to the same request.
fn graph_shape(rows: usize, rows_per_request: usize, longest: usize) -> StepShape {
    let row = BatchRowLengths { tokens: 1, context: longest };
    let bounds = BatchUpperBounds::of(std::iter::repeat_n(row, rows), rows_per_request);
    StepShape { tokens: rows, rows, logits_rows: rows, bounds, replay: ReplayShape::default() }
}

impl GraphCapturePlan {
    /// Returns the shape of a decode step of `rows` one-token rows with up to `longest` keys each.
    pub(crate) fn decode_shape(&self, rows: usize, longest: usize) -> StepShape {
        let shape = graph_shape(rows, self.tokens_per_row.max(1) as usize, longest);
        let ReplayCaptureLimits { width, requests } = self.replay;
        let replays = rows.checked_div(width).unwrap_or(0).min(requests);
        StepShape { replay: ReplayShape { rows: replays, tokens: rows }, ..shape }
    }

    /// Returns the shapes to capture, with up to `longest` keys per row, in ascending order of rows.
    pub(crate) fn shapes(&self, longest: usize) -> Vec<StepShape> {
        let short = longest > BatchUpperBounds::SHORT_CONTEXT;
        let of_rows = |rows: usize| {
            let short = (rows == 1 && short).then_some(BatchUpperBounds::SHORT_CONTEXT);
            short.into_iter().chain([longest]).map(move |longest| self.decode_shape(rows, longest))
        };
        let without_drafts = self.rows.iter().filter(|_| self.also_without_drafts).copied();
        let all = self.rows.iter().map(|rows| rows * self.tokens_per_row);
        let rows: BTreeSet<u32> = all.chain(without_drafts).collect();
        rows.into_iter().flat_map(|rows| of_rows(rows as usize)).collect()
    }
}

/// Runs a step of padding rows twice, so that all its memory is allocated, then captures it. The second run
/// is needed because, like every later step and unlike the first run, it starts with an arena (memory pool)
/// that an earlier run has used.
fn capture_step(
    model: &ModelContext,
    device: &mut StepDeviceState,
    launch: StepLaunchOptions,
    tracer: Option<&StepTracer>,
) -> Result<StepGraph, ExecutorError> {
    for _ in 0..2 {
        device.launch(model, launch, &mut StepTiming::default(), &mut None)?;
        model.ops.device().synchronize(model.ops.stream())?;
    }
    let LaunchCapture { graph, collectives } = capture_launches(model, device, launch, &mut None)?;
    let mut recorder = tracer.map(|tracer| tracer.span_recorder(&model.ops));
    if recorder.is_none() {
        return Ok(StepGraph { graph, collectives, instrumented: None });
    }
    let instrumented = match capture_launches(model, device, launch, &mut recorder) {
        Ok(capture) => recorder.map(|recorder| (capture.graph, recorder.finish())),
        Err(error) => {
            tracing::warn!(rows = launch.shape.rows, %error, "traces of these steps have no spans");
            None
        }
    };
    Ok(StepGraph { graph, collectives, instrumented })
}

fn capture_launches(
    model: &ModelContext,
    device: &mut StepDeviceState,
    launch: StepLaunchOptions,
    recorder: &mut Option<SpanRecorder>,
) -> Result<LaunchCapture, ExecutorError> {
    let (driver, stream) = (model.ops.device(), model.ops.stream());
    driver.begin_capture(stream)?;
    let groups = [&model.tp, &model.dp];
    for group in groups {
        group.begin_capture();
    }
    let launched = device.launch(model, launch, &mut StepTiming::default(), recorder);
    let graph = driver.end_capture(stream);
    let collectives = groups.map(ParallelGroup::end_capture);
    for group in groups {
        drop(group.take_times()); // The times were measured during the capture, so they belong to no step.
    }
    launched?;
    Ok(LaunchCapture { graph: graph?, collectives })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_row_graph_captured_for_short_contexts() {
        let sizes =
            |rows: &[u32], tokens_per_row, also_without_drafts, longest| -> Vec<(usize, usize)> {
                let shapes = GraphCapturePlan {
                    rows: rows.to_vec(),
                    tokens_per_row,
                    also_without_drafts,
                    ..GraphCapturePlan::default()
                }
                .shapes(longest);
                shapes.iter().map(|shape| (shape.rows, shape.bounds.max_context_len)).collect()
            };
        assert_eq!(sizes(&[1, 2], 1, false, 4096), [(1, 2048), (1, 4096), (2, 4096)]);
        assert_eq!(sizes(&[1, 4], 1, false, 2048), [(1, 2048), (4, 2048)]);
        assert_eq!(sizes(&[1, 2], 3, false, 512), [(3, 512), (6, 512)]);
        assert_eq!(sizes(&[1, 2, 4], 2, true, 512), [(1, 512), (2, 512), (4, 512), (8, 512)]);
    }

    #[test]
    fn graph_serves_no_longer_context() {
        let sizes = [(1, 2048), (1, 4096), (2, 4096), (6, 4096)];
        let graphs = sizes.iter().flat_map(|&(rows, context)| {
            // The graph for contexts of at most 2,048 keys has no variant with full rows of logits.
            let key = |full_logits| (StepGraphKey { full_logits, rows, context }, ());
            [false, true].map(key).into_iter().take(1 + usize::from(context > 2048))
        });
        let by_key = graphs.collect();
        let key = |full_logits, rows, context| {
            smallest_fitting(&by_key, full_logits, rows, context).map(|key| (key.rows, key.context))
        };
        let found = |rows, context| key(false, rows, context);
        assert_eq!(
            key(true, 1..=1, 1),
            Some((1, 4096)),
            "not the graph with vocab-parallel logits"
        );
        let one = [1, 2048, 2049, 4096].map(|c| found(1..=1, c));
        assert_eq!(one, [(1, 2048), (1, 2048), (1, 4096), (1, 4096)].map(Some));
        assert_eq!((found(1..=1, 4097), found(2..=2, 5)), (None, Some((2, 4096))));
        assert_eq!((found(3..=6, 5), found(3..=5, 5)), (Some((6, 4096)), None));
        assert_eq!(found(1..=6, 3000), Some((1, 4096)), "the graph with the fewest rows");
    }

    #[test]
    fn row_counts_fit_the_step() {
        let default_sizes = GraphCaptureConfig::default();
        assert_eq!(row_counts_to_capture(&default_sizes, 5), [1, 2, 4]);
        assert_eq!(row_counts_to_capture(&default_sizes, 1000).last(), Some(&512));
        assert_eq!(row_counts_to_capture(&default_sizes, 0), [0; 0]);
        assert_eq!(
            row_counts_to_capture(&GraphCaptureConfig::DefaultSizes { max_size: Some(9) }, 1000),
            [1, 2, 4, 8]
        );
        assert_eq!(
            row_counts_to_capture(&GraphCaptureConfig::Sizes(vec![6, 3, 0, 6, 99]), 50),
            [3, 6]
        );
        assert_eq!(row_counts_to_capture(&GraphCaptureConfig::Disabled, 50), [0; 0]);
    }
}
