//! Worker threads that compute the masks of live requests while the device runs a step. Requests with slow
//! masks are isolated from other requests.
//!
//! - A step waits for its masks for its expected duration plus a grace period (`mask_grace_period`: about a
//!   20th of that duration; longer for steps with draft tokens). After that, rows with overdue masks return
//!   no sampled token and are scheduled again once their masks are ready (`SchedulerEvent::MaskReady`).
//! - A row with draft tokens also gets a mask after each draft token. The executor reports the draft tokens
//!   while the step runs. The decoding guide follows the draft tokens as far as they are allowed, and then
//!   returns to its previous state. If the report or the masks after draft tokens are overdue, the step
//!   verifies only the draft tokens that have masks.
//! - Separate threads with lower priority process requests with slow masks. The speed of a grammar's masks,
//!   as measured by one request, applies to later requests. These threads also drop the guides of ended
//!   requests, so that the scheduler thread never has to.
//! - The computation of a mask that exceeds `MASK_TIME` is cancelled, and a request that exceeds its
//!   processor-time budget gets no more masks. In both cases the resulting mask allows no token, which ends
//!   only that request.

#[cfg(all(test, feature = "interleavings"))]
mod interleavings;
mod mask_timer;
mod mask_worker_pool;

use super::decoding_guide::DecodingGuide;
use super::limits::{draft_mask_grace_period, mask_grace_period};
use super::mask_session::{MaskCommand, MaskEvent, MaskSession, PendingMaskRow};
use super::step_mask_collector::StepMaskCollector;
use super::timings::GrammarTimings;
use mask_timer::{MaskTimer, MaskTimerCommand};
use mask_worker_pool::MaskWorkerPool;
use protocol::{Batch, ExecutorCommand, RequestId, StepDrafts, StepId, Token, TokenBitmask};
use scheduler::{SchedulerEffect, TokenEvent};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Sender, SyncSender};
use std::time::{Duration, Instant};

/// Number of output tokens that are passed to a session at once, before the first token that a mask may
/// restrict. Passing every token separately would cost time although no mask is needed yet.
const TOKENS_BUFFERED_MAX: usize = 64;

/// Batch row whose sampled token must be restricted by a grammar bitmask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaskedRow {
    /// Index of the row in the batch.
    pub row: u32,
    /// Request that the row belongs to.
    pub request: RequestId,
    /// Whether the row may have draft tokens; the executor will then report them.
    pub awaits_drafts: bool,
}

/// Returns the time for which a step of the expected duration `expected` waits for the bitmasks of `rows`.
fn grace_period(rows: &[MaskedRow], expected: Duration) -> Duration {
    if rows.iter().any(|masked| masked.awaits_drafts) {
        draft_mask_grace_period(expected)
    } else {
        mask_grace_period(expected)
    }
}

/// Handle of the mask workers (threads that compute token bitmasks), owned by the engine thread.
pub struct MaskWorkers {
    live: HashMap<RequestId, MaskSessionHandle>,
    pool: Arc<MaskWorkerPool>,
    timer: Sender<MaskTimerCommand>,
}

/// Engine thread's handle of the mask session of a request, with the output tokens that have not been
/// passed to the session.
struct MaskSessionHandle {
    session: Arc<MaskSession>,
    /// Number of output tokens of the request so far.
    output_tokens: u32,
    /// Number of output tokens before the first token that a mask may restrict.
    first_masked_token: u32,
    /// Newest output tokens that have not been passed to the session.
    buffered: Vec<Token>,
    /// Latest step for which the executor has not yet reported the draft tokens of the request's row.
    awaiting_drafts: Option<(StepId, PendingMaskRow)>,
}

impl MaskSessionHandle {
    /// Completes the row of an earlier step whose draft tokens will not be reported, because the request was
    /// aborted or preempted. Otherwise the step would wait for the row until its deadline.
    fn stop_awaiting_drafts(&mut self) {
        if let Some((_, PendingMaskRow { collector, row })) = self.awaiting_drafts.take() {
            collector.put(row, Vec::new(), true);
        }
    }
}

impl MaskWorkers {
    /// Starts the threads. `listener` is called when a precomputed mask or an overdue mask becomes ready,
    /// and when a request needs no more masks.
    ///
    /// Errors: a thread cannot be started.
    pub fn start(
        timings: &Arc<GrammarTimings>,
        listener: impl Fn(RequestId, MaskEvent) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let pool = Arc::new(MaskWorkerPool::new(Arc::clone(timings), Arc::new(listener)));
        pool.start_threads()?;
        let timer = MaskTimer::start(Arc::clone(timings))?;
        Ok(Self { live: HashMap::new(), pool, timer })
    }

    /// Registers a request whose output is restricted by `guide` (a grammar, a thinking budget, or both).
    /// Must be called before the request is submitted.
    pub fn begin(&mut self, request: RequestId, guide: DecodingGuide) {
        let first_masked_token = guide.first_masked_token().unwrap_or(u32::MAX);
        let session = Arc::new(MaskSession::new(request, guide));
        self.notify_timer(MaskTimerCommand::Begin(Arc::downgrade(&session)));
        self.live.insert(
            request,
            MaskSessionHandle {
                session,
                output_tokens: 0,
                first_masked_token,
                buffered: Vec::new(),
                awaiting_drafts: None,
            },
        );
    }

    /// Passes the tokens committed by a scheduler tick to the mask sessions of their requests. Must be
    /// called before a batch of the tick is sent, because the token bitmasks for the batch depend on these
    /// tokens.
    pub fn observe_effects(&mut self, effects: &[SchedulerEffect]) {
        if self.live.is_empty() {
            return;
        }
        for effect in effects {
            if let SchedulerEffect::TokenEvents(events) = effect {
                for event in events {
                    self.observe_event(event);
                }
            }
        }
    }

    fn observe_event(&mut self, event: &TokenEvent) {
        if event.finish_reason.is_some() {
            if let Some(mut live) = self.live.remove(&event.request) {
                live.stop_awaiting_drafts();
                if live.session.end() {
                    self.pool.slow.add(live.session);
                }
            }
        } else if let Some(live) = self.live.get_mut(&event.request)
            && !event.tokens.is_empty()
        {
            live.output_tokens += event.tokens.len() as u32;
            live.awaiting_drafts = None; // The step has completed.
            if live.session.is_done() {
                return;
            }
            live.buffered.extend_from_slice(&event.tokens);
            if live.output_tokens >= live.first_masked_token
                || live.buffered.len() >= TOKENS_BUFFERED_MAX
            {
                let tokens = live.buffered.as_slice().into();
                live.buffered.clear();
                self.pool.enqueue(&live.session, MaskCommand::Tokens(tokens));
            }
        }
    }

    /// Returns the rows of a batch whose sampled token must be restricted by a grammar bitmask.
    pub fn masked_rows(&self, batch: &Batch) -> Vec<MaskedRow> {
        if self.live.is_empty() {
            return Vec::new();
        }
        let rows = (0..).zip(&batch.rows).filter(|(_, row)| row.masked);
        let masked = |(index, row): (u32, &protocol::BatchRow)| MaskedRow {
            row: index,
            request: row.request,
            awaits_drafts: row.drafts > 0,
        };
        rows.map(masked).collect()
    }

    /// Requests the token bitmasks for a batch that has just been sent to `executor`. `expected` is the
    /// expected duration of the step.
    pub fn request_masks(
        &mut self,
        step: StepId,
        rows: Vec<MaskedRow>,
        executor: &SyncSender<ExecutorCommand>,
        expected: Duration,
    ) {
        let deadline = Instant::now() + expected + grace_period(&rows, expected);
        let waiting = rows.iter().map(|masked| masked.row).collect();
        let collector = Arc::new(StepMaskCollector::new(step, executor.clone(), waiting));
        for MaskedRow { row, request, awaits_drafts } in rows {
            let Some(live) = self.live.get_mut(&request) else {
                // A request without a session gets an empty mask, which allows no token.
                collector.put(row, vec![TokenBitmask::default()], true);
                continue;
            };
            let request = PendingMaskRow { collector: Arc::clone(&collector), row };
            live.stop_awaiting_drafts();
            live.awaiting_drafts = awaits_drafts.then(|| (step, request.clone()));
            if let Some(mask) = live.session.ready_mask(live.output_tokens) {
                collector.put(row, vec![mask], !awaits_drafts);
            } else {
                let compute = MaskCommand::Compute { request, awaits_drafts };
                self.pool.enqueue(&live.session, compute);
            }
        }
        if !collector.is_complete() {
            self.notify_timer(MaskTimerCommand::Step(deadline, collector));
        }
    }

    /// Requests the token bitmasks for the positions after the draft tokens that the executor has reported
    /// for a step.
    pub fn report_drafts(&mut self, drafts: StepDrafts) {
        for row in drafts.rows {
            let Some(live) = self.live.get_mut(&row.request) else { continue };
            let awaiting = live.awaiting_drafts.take_if(|(step, _)| *step == drafts.step);
            if let Some((_, request)) = awaiting {
                let command = MaskCommand::FollowDrafts { request, drafts: row.tokens };
                self.pool.enqueue(&live.session, command);
            }
        }
    }

    fn notify_timer(&self, event: MaskTimerCommand) {
        let _ = self.timer.send(event); // The timer thread runs until this sender is dropped.
    }
}

impl Drop for MaskWorkers {
    fn drop(&mut self) {
        for live in self.live.values() {
            live.session.end();
        }
        self.pool.close();
    }
}
