//! Simulated workers that build the grammar bitmasks of requests with a grammar. Bitmasks are usually ready
//! in time and sometimes overdue. For a while after an overdue bitmask, bitmasks are built before the step is
//! sent. Sometimes only the bitmasks after draft tokens are overdue.

use crate::client::ClientStage;
use crate::event_queue::SimEvent;
use crate::hash_model::text::HashGrammar;
use crate::request_generator::masked_range;
use crate::world::SimWorld;
use protocol::{BitmaskRow, RequestId, Token, TokenBitmask};
use scheduler::SchedulerEvent;
use std::ops::Range;

/// Maximum time in milliseconds until a grammar bitmask is ready, or until the scheduler is notified that the
/// request needs no further bitmasks.
const MASK_MS: u64 = 40;
/// Number per 1000 of rows with draft tokens for which only the bitmasks after draft tokens are overdue.
const OVERDUE_DRAFT_MASKS: u32 = 100;

/// Builds the grammar bitmasks of one request. A bitmask is identified by the number of output tokens before
/// it.
#[derive(Debug, Default)]
pub(crate) struct SimMaskWorker {
    /// Whether the worker builds ahead: it starts to build a bitmask when the previous tokens arrive instead
    /// of when the step is sent, and it reports when each bitmask is ready.
    works_ahead: bool,
    /// Whether a step was sent before the bitmask that it needs was ready.
    missed_step: bool,
    working_on: Option<u32>,
    ready_for: Option<u32>,
    /// Whether the scheduler was notified that no further bitmasks are needed.
    done_reported: bool,
}

/// Grammar of a masked row (a row sampled under a grammar) at the time when its batch was sent. The bitmasks
/// of the row are built from it once the draft tokens are known.
#[derive(Debug)]
pub(crate) struct MaskedRowGrammar {
    /// Index of the row in its batch.
    pub(crate) row: u32,
    /// State of the grammar after the request's output tokens.
    pub(crate) grammar: HashGrammar,
    /// Number of output tokens.
    pub(crate) outputs: u32,
    /// Range of output token indices that the grammar restricts.
    pub(crate) limited: Range<u32>,
    /// Maximum number of bitmasks of the row that are ready in time; 0 = the first bitmask is overdue.
    pub(crate) ready_max: usize,
}

impl MaskedRowGrammar {
    /// Returns the bitmasks of the row: for its first sample position, and for the position after each
    /// allowed draft token.
    pub(crate) fn bitmasks(&self, drafts: &[Token]) -> BitmaskRow {
        let mut grammar = self.grammar.clone();
        let mut bitmasks: Vec<TokenBitmask> = Vec::new();
        for position in 0..=drafts.len() {
            if let Some(previous) = position.checked_sub(1) {
                if !bitmasks[previous].allows(drafts[previous]) {
                    break;
                }
                grammar.observe(drafts[previous]);
            }
            let mask = grammar.mask();
            let is_limited = self.limited.contains(&(self.outputs + position as u32));
            bitmasks.push(if is_limited { mask } else { vec![u32::MAX; mask.len()] }.into());
        }
        bitmasks.truncate(self.ready_max);
        BitmaskRow { row: self.row, bitmasks }
    }
}

impl SimWorld {
    /// Returns whether a step that has just been sent runs without the request's bitmask. If so, the worker
    /// reports later that the bitmask is ready, before or after the step's output arrives.
    pub(crate) fn mask_is_overdue(&mut self, request: RequestId) -> bool {
        let overdue = self.rng.chance_per_mille(self.config.faults.overdue_mask);
        let client = &mut self.clients[request.0 as usize - 1];
        let outputs = client.output_len();
        let worker = &mut client.mask_worker;
        if !overdue || worker.ready_for == Some(outputs) {
            return false;
        }
        (worker.works_ahead, worker.missed_step) = (true, true);
        self.counts.overdue_masks += 1;
        self.begin_mask(request, outputs);
        true
    }

    /// For a row with draft tokens, draws the number of its bitmasks that are ready in time; at least one.
    pub(crate) fn draft_masks_ready(&mut self, drafts: u8) -> usize {
        if drafts == 0 || !self.rng.chance_per_mille(OVERDUE_DRAFT_MASKS) {
            return usize::MAX;
        }
        self.counts.overdue_draft_masks += 1;
        1 + self.rng.below(drafts.into()) as usize
    }

    /// Starts building the next bitmask when a client's tokens arrive, if the worker builds ahead.
    pub(crate) fn begin_mask_ahead(&mut self, index: usize) {
        let client = &self.clients[index];
        if client.mask_worker.works_ahead && client.stage == ClientStage::Live {
            self.begin_mask(client.id(), client.output_len());
        }
    }

    /// Schedules the notification that a request needs no bitmask for the tokens after those that have
    /// arrived.
    pub(crate) fn end_masks(&mut self, index: usize) {
        let client = &mut self.clients[index];
        let ends =
            masked_range(&client.submit).is_some_and(|tokens| tokens.end <= client.output_len());
        if ends
            && client.stage == ClientStage::Live
            && !std::mem::replace(&mut client.mask_worker.done_reported, true)
        {
            let (request, at_ms) = (client.id(), self.now_ms + self.rng.below(MASK_MS));
            self.events.add(at_ms, SimEvent::MasksDone { request });
            self.counts.ended_masks += 1;
        }
    }

    fn begin_mask(&mut self, request: RequestId, outputs: u32) {
        let worker = &mut self.clients[request.0 as usize - 1].mask_worker;
        if worker.working_on.replace(outputs) != Some(outputs) {
            let at_ms = self.now_ms + self.rng.below(MASK_MS);
            self.events.add(at_ms, SimEvent::MaskReady { request, output_tokens: outputs });
        }
    }

    /// Marks a request's bitmask as ready and notifies the scheduler.
    pub(crate) fn mask_ready(&mut self, request: RequestId, outputs: u32) {
        let stops_ahead = self.rng.chance_per_mille(200);
        let worker = &mut self.clients[request.0 as usize - 1].mask_worker;
        if worker.working_on != Some(outputs) {
            return;
        }
        worker.works_ahead = worker.missed_step || !stops_ahead;
        (worker.missed_step, worker.working_on, worker.ready_for) = (false, None, Some(outputs));
        let ahead = worker.works_ahead;
        self.trace.record(self.now_ms, "mask", &[request.0, outputs.into(), ahead.into()]);
        self.inbox.push(SchedulerEvent::MaskReady {
            request,
            output_tokens: outputs,
            wait_for_next: ahead,
        });
    }
}
