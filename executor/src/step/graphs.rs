//! Captured steps: one recording per number of rows, replayed by every pure decode step, and a second one
//! with marks between its launches where traces may be taken. One row has two, for short contexts and for any. Where ranks
//! share a head, each has a twin for steps that want whole rows of logits: what ranks tell each other has a fixed size in it.
//! Rows with drafts are laid out as rows of one token each, so a recording of their sum serves them.
//!
//! A recording has fixed addresses and a fixed number of rows; rows beyond those of its batch are
//! padding that `prepare` lays out as such. Recordings are made before the executor is ready.

use super::launch::{DeviceState, StepLaunch};
use crate::ExecutorError;
use crate::model_context::ModelContext;
use crate::trace::{DeviceSpan, SpanRecorder, StepTracer};
use collectives::{CollectiveCall, ParallelGroup};
use ops::{CapturedGraph, RowBounds, StepShape};
use protocol::{GraphCapture, StepTiming};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Rows that recordings are made for, where a step may have so many and nobody named others.
const ROWS: [u32; 11] = [1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512];

/// Recordings by what they serve.
#[derive(Debug, Default)]
pub(crate) struct StepGraphs {
    by_key: BTreeMap<GraphKey, StepGraph>,
    /// Rows of batches that there is a recording for, ascending.
    rows: Vec<u32>,
}

/// Steps to record.
#[derive(Debug, Clone, Default)]
pub(crate) struct CapturePlan {
    /// Rows of batches, ascending.
    pub(crate) rows: Vec<u32>,
    /// Tokens of a row with all its drafts.
    pub(crate) tokens_per_row: u32,
    /// Whether rows may come without drafts, and would have less to do then.
    pub(crate) also_without_drafts: bool,
}

/// Steps that a recording serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GraphKey {
    /// Whether whole rows of logits are brought together.
    full_logits: bool,
    /// Rows, padding included.
    pub(crate) rows: u32,
    /// Keys of the longest row at most.
    context: usize,
}

/// Collectives of a recording, in the group that shares layers and in the one that shares experts.
pub(crate) type CapturedCollectives = [Vec<CollectiveCall>; 2];

/// A step of some number of rows.
#[derive(Debug)]
pub(crate) struct StepGraph {
    pub(crate) graph: CapturedGraph,
    /// The collectives in it.
    pub(crate) collectives: CapturedCollectives,
    /// The same with marks, and what they are behind.
    pub(crate) instrumented: Option<(CapturedGraph, Arc<[DeviceSpan]>)>,
}

/// Rows to capture for steps of up to `most` rows, ascending.
pub(crate) fn row_counts_to_capture(capture: &GraphCapture, most: usize) -> Vec<u32> {
    let (rows, most) = match capture {
        GraphCapture::Disabled => (&[][..], 0),
        GraphCapture::DefaultSizes { max_size: rows_max } => {
            (&ROWS[..], rows_max.map_or(most, |max| most.min(max as usize)))
        }
        GraphCapture::Sizes(rows) => (&rows[..], most),
    };
    let fitting = rows.iter().copied().filter(|&rows| (1..=most).contains(&(rows as usize)));
    fitting.collect::<BTreeSet<_>>().into_iter().collect()
}

impl StepGraphs {
    /// The size of the recording for one of these numbers of rows, each of up to `context` keys: the tightest.
    pub(crate) fn size(
        &self,
        whole_rows: bool,
        rows: RangeInclusive<u32>,
        context: usize,
    ) -> Option<GraphKey> {
        smallest_fitting(&self.by_key, whole_rows, rows, context)
    }

    /// The recording of a size that `size` gave.
    pub(crate) fn get(&self, size: GraphKey) -> Option<&StepGraph> {
        self.by_key.get(&size)
    }

    /// Rows of batches, ascending.
    pub(crate) fn rows(&self) -> Vec<u32> {
        self.rows.clone()
    }

    /// Records a step of each of `shapes`, the largest first. One that cannot be recorded is left out, and
    /// its steps run launch by launch.
    pub(crate) fn capture(
        engine: &ModelContext,
        device: &mut DeviceState,
        wanted: &CapturePlan,
        shapes: &[StepShape],
        tracer: Option<&StepTracer>,
        mut done: impl FnMut(u64),
    ) -> Self {
        let mut by_size = BTreeMap::new();
        for (i, &shape) in (1..).zip(shapes.iter().rev()) {
            let (rows, context) = (shape.rows as u32, shape.bounds.max_context_len);
            let drafting =
                device.drafts.is_some().then(|| shape.rows / wanted.tokens_per_row as usize);
            for &whole_rows in engine.full_logits_variants() {
                let launch = StepLaunch::of_all(shape, whole_rows, drafting, engine);
                let size = GraphKey { full_logits: whole_rows, rows, context };
                match capture_step(engine, device, launch, tracer) {
                    Ok(recording) => drop(by_size.insert(size, recording)),
                    Err(error) => {
                        tracing::warn!(rows, %error, "no graph for steps of so many rows");
                    }
                }
            }
            done(i);
        }
        let recorded =
            |&rows: &u32| by_size.keys().any(|size| size.rows == rows * wanted.tokens_per_row);
        let rows = wanted.rows.iter().copied().filter(recorded).collect();
        Self { by_key: by_size, rows }
    }
}

fn smallest_fitting<R>(
    by_size: &BTreeMap<GraphKey, R>,
    whole_rows: bool,
    rows: RangeInclusive<u32>,
    context: usize,
) -> Option<GraphKey> {
    let from = GraphKey { full_logits: whole_rows, rows: *rows.start(), context: 0 };
    let to = GraphKey { full_logits: whole_rows, rows: *rows.end(), context: usize::MAX };
    by_size.range(from..=to).map(|(size, _)| *size).find(|size| size.context >= context)
}

/// A step of `rows` rows of one token each, of which up to `successive` may be a request's, with up to `longest` keys.
pub(crate) fn graph_shape(rows: usize, successive: usize, longest: usize) -> StepShape {
    let bounds = RowBounds::of(std::iter::repeat_n((1, longest), rows), successive);
    StepShape { tokens: rows, rows, logits_rows: rows, bounds }
}

impl CapturePlan {
    /// Their shapes, with up to `longest` keys a row; fewest rows first.
    pub(crate) fn shapes(&self, longest: usize) -> Vec<StepShape> {
        let short = longest > RowBounds::SHORT_CONTEXT;
        let of_rows = |rows: usize| {
            let short = (rows == 1 && short).then_some(RowBounds::SHORT_CONTEXT);
            short
                .into_iter()
                .chain([longest])
                .map(move |longest| graph_shape(rows, self.tokens_per_row as usize, longest))
        };
        let fewer = self.rows.iter().filter(|_| self.also_without_drafts).copied();
        let all = self.rows.iter().map(|rows| rows * self.tokens_per_row);
        let rows: BTreeSet<u32> = all.chain(fewer).collect();
        rows.into_iter().flat_map(|rows| of_rows(rows as usize)).collect()
    }
}

/// Runs a step of padding, so that all its memory exists, then records it. Twice: only the second run works beside
/// what the one before left, as every later one does.
fn capture_step(
    engine: &ModelContext,
    device: &mut DeviceState,
    launch: StepLaunch,
    tracer: Option<&StepTracer>,
) -> Result<StepGraph, ExecutorError> {
    for _ in 0..2 {
        device.launch(engine, launch, &mut StepTiming::default(), &mut None)?;
        engine.ops.device().synchronize(engine.ops.stream())?;
    }
    let (graph, calls) = capture_launches(engine, device, launch, &mut None)?;
    let mut laps = tracer.map(|tracer| tracer.span_recorder(&engine.ops));
    if laps.is_none() {
        return Ok(StepGraph { graph, collectives: calls, instrumented: None });
    }
    let marked = match capture_launches(engine, device, launch, &mut laps) {
        Ok((marked, _)) => laps.map(|laps| (marked, laps.finish())),
        Err(error) => {
            tracing::warn!(rows = launch.shape.rows, %error, "traces show such steps only as a whole");
            None
        }
    };
    Ok(StepGraph { graph, collectives: calls, instrumented: marked })
}

fn capture_launches(
    engine: &ModelContext,
    device: &mut DeviceState,
    launch: StepLaunch,
    laps: &mut Option<SpanRecorder>,
) -> Result<(CapturedGraph, CapturedCollectives), ExecutorError> {
    let (driver, stream) = (engine.ops.device(), engine.ops.stream());
    driver.begin_capture(stream)?;
    let groups = [&engine.tp, &engine.dp];
    for group in groups {
        group.begin_capture();
    }
    let launched = device.launch(engine, launch, &mut StepTiming::default(), laps);
    let graph = driver.end_capture(stream);
    let calls = groups.map(ParallelGroup::end_capture);
    for group in groups {
        drop(group.take_times()); // No step has spent it.
    }
    launched?;
    Ok((graph?, calls))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_row_graph_captured_for_short_contexts() {
        let sizes = |rows: &[u32], width, fewer, longest| -> Vec<(usize, usize)> {
            let shapes = CapturePlan {
                rows: rows.to_vec(),
                tokens_per_row: width,
                also_without_drafts: fewer,
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
        let of_both = sizes.iter().flat_map(|&(rows, context)| {
            // Of those that bring whole rows together the smallest is missing.
            let size = |whole_rows| (GraphKey { full_logits: whole_rows, rows, context }, ());
            [false, true].map(size).into_iter().take(1 + usize::from(context > 2048))
        });
        let by_size = of_both.collect();
        let size = |whole_rows, rows, context| {
            smallest_fitting(&by_size, whole_rows, rows, context)
                .map(|size| (size.rows, size.context))
        };
        let found = |rows, context| size(false, rows, context);
        assert_eq!(size(true, 1..=1, 1), Some((1, 4096)), "not the one of parts");
        let one = [1, 2048, 2049, 4096].map(|c| found(1..=1, c));
        assert_eq!(one, [(1, 2048), (1, 2048), (1, 4096), (1, 4096)].map(Some));
        assert_eq!((found(1..=1, 4097), found(2..=2, 5)), (None, Some((2, 4096))));
        assert_eq!((found(3..=6, 5), found(3..=5, 5)), (Some((6, 4096)), None));
        assert_eq!(found(1..=6, 3000), Some((1, 4096)), "the fewest rows");
    }

    #[test]
    fn row_counts_fit_the_step() {
        let usual = GraphCapture::default();
        assert_eq!(row_counts_to_capture(&usual, 5), [1, 2, 4]);
        assert_eq!(row_counts_to_capture(&usual, 1000).last(), Some(&512));
        assert_eq!(row_counts_to_capture(&usual, 0), [0; 0]);
        assert_eq!(
            row_counts_to_capture(&GraphCapture::DefaultSizes { max_size: Some(9) }, 1000),
            [1, 2, 4, 8]
        );
        assert_eq!(row_counts_to_capture(&GraphCapture::Sizes(vec![6, 3, 0, 6, 99]), 50), [3, 6]);
        assert_eq!(row_counts_to_capture(&GraphCapture::Disabled, 50), [0; 0]);
    }
}
