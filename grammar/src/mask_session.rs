//! Mask session of a live request: computes the output's bitmasks ("masks") from its decoding guide, and
//! measures whether the masks are fast enough to be computed during a step.
//!
//! Commands wait in an inbox until a worker thread runs the session; at most one thread runs a session at a
//! time. The mask of the next token is computed as soon as the tokens before it are committed.

mod mask_command;
mod session_state;

use super::decoding_guide::{DecodingGuide, DecodingGuideState, DraftMasks};
use super::limits::{MASK_SLOW, MASK_TIME};
use super::mask_lookahead::MaskLookahead;
use super::timings::{GrammarTimings, thread_cpu_time};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, lock};
use mask_command::{MaskCancellation, MaskCommandInbox};
pub(super) use mask_command::{MaskCommand, PendingMaskRow};
use protocol::{RequestId, Token, TokenBitmask};
use session_state::MaskSessionState;
use std::mem::take;
use std::sync::{Arc, atomic};
use std::time::{Duration, Instant};

/// Callback for mask events, on which the scheduler's planning depends.
pub(super) type MaskEventListener = Arc<dyn Fn(RequestId, MaskEvent) + Send + Sync>;

/// Event about the token bitmasks (masks) of a request, for the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskEvent {
    /// A mask is ready for which the scheduler may be waiting: a precomputed mask, or an overdue mask
    /// without which a step has proceeded.
    Ready {
        /// Number of output tokens before the token that the mask restricts.
        output_tokens: u32,
        /// Whether the next mask will be precomputed. The scheduler then schedules the next token only after
        /// that mask is ready.
        wait_for_next: bool,
    },
    /// No later token of the request needs a mask.
    Done,
}

/// Mask session of a live request: computes the token bitmasks that its grammar and its thinking budget
/// require.
pub(super) struct MaskSession {
    request: RequestId,
    inbox: Mutex<MaskCommandInbox>,
    work: Mutex<MaskSessionState>,
    /// Newest token bitmask, and the number of output tokens before the token that the bitmask restricts.
    ready: Mutex<Option<(u32, TokenBitmask)>>,
    /// Handle that cancels the mask computation in progress.
    cancellation: Mutex<Option<MaskCancellation>>,
    slow: AtomicBool,
    /// Whether the grammar's token bitmasks are slow to compute; shared by all requests with this grammar.
    grammar_is_slow: Arc<atomic::AtomicBool>,
    /// Whether neither the grammar nor the thinking budget restricts any later token, so that no more masks
    /// are needed.
    done: AtomicBool,
}

impl MaskSession {
    pub(super) fn new(request: RequestId, guide: DecodingGuide) -> Self {
        let grammar_is_slow = guide.is_slow();
        let is_slow = grammar_is_slow.load(Ordering::Relaxed);
        let work = MaskSessionState {
            first_masked_token: guide.first_masked_token().unwrap_or(u32::MAX),
            guide: DecodingGuideState::new(guide),
            output_tokens: 0,
            spent: Duration::ZERO,
            spent_on_drafts: Duration::ZERO,
            pacing: MaskLookahead::new(is_slow),
        };
        Self {
            request,
            inbox: Mutex::default(),
            work: Mutex::new(work),
            ready: Mutex::default(),
            cancellation: Mutex::default(),
            slow: AtomicBool::new(is_slow),
            grammar_is_slow,
            done: AtomicBool::new(false),
        }
    }

    /// Returns the mask of the token that follows `output_tokens` output tokens, if the mask is ready.
    pub(super) fn ready_mask(&self, output_tokens: u32) -> Option<TokenBitmask> {
        lock(&self.ready)
            .as_ref()
            .filter(|(position, _)| *position == output_tokens)
            .map(|(_, mask)| mask.clone())
    }

    /// Adds a command to the inbox. Returns whether the caller must queue the session for a worker thread.
    pub(super) fn enqueue(&self, command: MaskCommand) -> bool {
        let mut inbox = lock(&self.inbox);
        inbox.commands.push(command);
        !std::mem::replace(&mut inbox.scheduled, true)
    }

    /// Ends the session and cancels the mask computation in progress. Returns whether the caller must queue
    /// the session for a worker thread, which then drops the grammar, because dropping a large grammar is
    /// too slow for the engine thread.
    pub(super) fn end(&self) -> bool {
        let mut inbox = lock(&self.inbox);
        inbox.ended = true;
        let idle = !std::mem::replace(&mut inbox.scheduled, true);
        drop(inbox);
        if let Some(cancellation) = &*lock(&self.cancellation) {
            cancellation.handle.cancel();
        }
        idle
    }

    /// Cancels the mask computation in progress if it exceeds `MASK_TIME`.
    pub(super) fn cancel_if_overdue(&self, now: Instant) {
        let cancellation = lock(&self.cancellation);
        let started_at = cancellation.as_ref().and_then(|cancellation| cancellation.started_at);
        if started_at.is_some_and(|start| now.saturating_duration_since(start) > MASK_TIME) {
            tracing::warn!(request = self.request.0, "mask computation timed out");
            cancellation.iter().for_each(|cancellation| cancellation.handle.cancel());
        }
    }

    /// Whether neither the grammar nor the thinking budget restricts any later token, so that no more masks
    /// are needed.
    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Relaxed)
    }

    /// Whether the session's masks are so slow to compute that they would delay the masks of other requests
    /// on the same thread.
    pub(super) fn is_slow(&self) -> bool {
        self.slow.load(Ordering::Relaxed)
    }

    /// Executes the commands in the inbox. Returns true if the session's masks became slow or fast; the
    /// caller must then queue the session again, in the queue for slow or for fast masks.
    pub(super) fn run_commands(
        &self,
        timings: &GrammarTimings,
        listener: &MaskEventListener,
    ) -> bool {
        let mut work = lock(&self.work);
        loop {
            let commands = {
                let mut inbox = lock(&self.inbox);
                if inbox.ended {
                    work.guide.end();
                    inbox.commands.clear();
                }
                if inbox.commands.is_empty() {
                    inbox.scheduled = false;
                    return false;
                }
                take(&mut inbox.commands)
            };
            let was_slow = self.is_slow();
            self.execute(&mut work, commands, timings, listener);
            if self.is_slow() != was_slow {
                return true;
            }
        }
    }

    fn execute(
        &self,
        work: &mut MaskSessionState,
        commands: Vec<MaskCommand>,
        timings: &GrammarTimings,
        listener: &MaskEventListener,
    ) {
        let (mut requested, mut drafted) = (Vec::new(), None);
        for command in commands {
            match command {
                MaskCommand::Tokens(tokens) => {
                    (requested, drafted) = (Vec::new(), None); // Steps before these tokens have completed.
                    self.advance(work, &tokens);
                }
                MaskCommand::Compute { request, awaits_drafts } => {
                    requested.push((request, awaits_drafts));
                }
                MaskCommand::FollowDrafts { request, drafts } => drafted = Some((request, drafts)),
            }
        }
        if work.guide.is_done() && !self.done.swap(true, Ordering::Relaxed) {
            listener(self.request, MaskEvent::Done);
        }
        let is_free = self.is_done() || work.output_tokens < work.first_masked_token;
        if requested.is_empty() && drafted.is_none() && is_free {
            return;
        }
        let ready = self.ready_mask(work.output_tokens);
        let is_new = ready.is_none();
        let (mask, cpu) = match ready {
            Some(mask) => (mask, Duration::ZERO),
            None => self.compute_mask(work, timings),
        };
        let is_late =
            |(PendingMaskRow { collector, row }, awaits_drafts): &(PendingMaskRow, bool)| {
                !collector.put(*row, vec![mask.clone()], !awaits_drafts)
            };
        let late_steps = requested.iter().filter(|request| is_late(request)).count();
        if is_new || !requested.is_empty() {
            let may_wait = self.record_speed(work, late_steps > 0, cpu);
            if late_steps > 0 || is_new && may_wait {
                self.report_ready(work, listener);
            }
        }
        // If the step no longer waits, the masks after its draft tokens are not computed, because they
        // would only delay the mask of the next step.
        let drafted =
            drafted.filter(|(PendingMaskRow { collector, row }, _)| collector.awaits(*row));
        if let Some((PendingMaskRow { collector, row }, drafts)) = drafted {
            let (bitmasks, cpu) = self.compute_draft_masks(work, &mask, &drafts, timings);
            collector.put(row, bitmasks, true);
            // Slow masks after draft tokens mark the grammar's masks as slow; fast masks after draft tokens
            // never mark them as fast again.
            if cpu > MASK_SLOW && !work.pacing.precomputes && self.record_speed(work, false, cpu) {
                self.report_ready(work, listener);
            }
        }
    }

    /// Records `cpu`, the processor time of a mask, and `is_late`, whether a step proceeded without the
    /// mask. Returns whether the request's masks are precomputed now, or were before this call.
    fn record_speed(&self, work: &mut MaskSessionState, is_late: bool, cpu: Duration) -> bool {
        let was_precomputing = work.pacing.precomputes;
        work.pacing.record(is_late, cpu);
        self.slow.store(work.pacing.precomputes, Ordering::Relaxed);
        if cpu > MASK_SLOW || was_precomputing && !work.pacing.precomputes {
            self.grammar_is_slow.store(cpu > MASK_SLOW, Ordering::Relaxed);
        }
        was_precomputing || work.pacing.precomputes
    }

    /// Reports that the mask of the next token is ready.
    fn report_ready(&self, work: &MaskSessionState, listener: &MaskEventListener) {
        let (output_tokens, wait_for_next) = (work.output_tokens, work.pacing.precomputes);
        listener(self.request, MaskEvent::Ready { output_tokens, wait_for_next });
    }

    fn advance(&self, work: &mut MaskSessionState, tokens: &[Token]) {
        work.output_tokens += tokens.len() as u32;
        if let Err(error) = work.guide.advance(tokens) {
            tracing::error!(request = self.request.0, %error);
        }
    }

    /// Computes the mask of the next token, and returns it with its processor time. If the computation
    /// fails, the mask is empty: it allows no token.
    fn compute_mask(
        &self,
        work: &mut MaskSessionState,
        timings: &GrammarTimings,
    ) -> (TokenBitmask, Duration) {
        if let Some(handle) = work.guide.begin() {
            *lock(&self.cancellation) = Some(MaskCancellation { handle, started_at: None });
        }
        let (start, cpu_before) = (Instant::now(), thread_cpu_time());
        self.set_started_at(Some(start));
        let mask = work.guide.mask().unwrap_or_else(|error| {
            tracing::error!(request = self.request.0, %error);
            None
        });
        self.set_started_at(None);
        let cpu = thread_cpu_time().saturating_sub(cpu_before);
        work.spent += cpu;
        let mask = mask.filter(|_| work.is_within_cpu_budget(self.request));
        timings.masks.record(start.elapsed());
        if mask.is_none() {
            timings.masks_failed.fetch_add(1, Ordering::Relaxed);
        }
        let mask = TokenBitmask::from(mask.unwrap_or_default());
        *lock(&self.ready) = Some((work.output_tokens, mask.clone()));
        (mask, cpu)
    }

    /// Computes the token bitmask for the position after each draft token, up to the first draft token that
    /// is not allowed. `first` is the bitmask for the position of the first draft token. Also returns the
    /// mean processor time per bitmask.
    fn compute_draft_masks(
        &self,
        work: &mut MaskSessionState,
        first: &TokenBitmask,
        drafts: &[Token],
        timings: &GrammarTimings,
    ) -> (Vec<TokenBitmask>, Duration) {
        if work.spent_on_drafts > work.cpu_budget() {
            return (Vec::new(), Duration::ZERO);
        }
        let (start, cpu_before) = (Instant::now(), thread_cpu_time());
        self.set_started_at(Some(start));
        let masks = work.guide.draft_masks(first, drafts);
        self.set_started_at(None);
        let cpu = thread_cpu_time().saturating_sub(cpu_before);
        work.spent_on_drafts += cpu;
        let DraftMasks { bitmasks, cancellation } = match masks {
            Ok(masks) => masks,
            Err(error) => {
                tracing::error!(request = self.request.0, %error);
                return (Vec::new(), cpu);
            }
        };
        if let Some(handle) = cancellation {
            *lock(&self.cancellation) = Some(MaskCancellation { handle, started_at: None });
        }
        let count = bitmasks.len().max(1) as u32;
        (0..bitmasks.len()).for_each(|_| timings.masks.record(start.elapsed() / count));
        (bitmasks, cpu / count)
    }

    fn set_started_at(&self, started_at: Option<Instant>) {
        lock(&self.cancellation).iter_mut().for_each(|current| current.started_at = started_at);
    }
}
