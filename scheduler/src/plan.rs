//! Decides the next step of one replica.
//!
//! Pure: reads state and cache, changes neither. Owns nothing and refuses nothing: `queue.rs` has
//! turned away what can never fit. `commit` runs right behind it, so what was counted here is there.

use crate::Limits;
use crate::request::Request;
use crate::slab::Slot;
use crate::state::{Blocked, State};
use kvcache::{Bug, KvCache};
use protocol::BlockId;

/// What the next step runs, and what must happen before.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Rows in the order of the batch.
    pub(crate) rows: Vec<PlannedRow>,
    /// Rows of the first pass: `rows[..decodes]`.
    pub(crate) decodes: usize,
    /// Admissions; their rows are the last ones, in this order.
    pub(crate) admit: Vec<Admission>,
    /// Prefix hits of all admissions, one after the other.
    pub(crate) hits: Vec<BlockId>,
    /// Running requests whose blocks are taken back.
    pub(crate) preempt: Vec<Slot>,
    /// Why the head of the queue stays there, if blocks are the reason.
    pub(crate) blocked: Option<Blocked>,
    /// Tokens that the requests of passes 2 and 3 want, beyond this step's chunks too.
    pub(crate) prefill_wanted: u64,
    /// Places in the running line of requests that do not decode: the only ones that pass 2 looks at.
    others: Vec<usize>,
    /// Blocks that the victims hold.
    held: Held,
}

/// One chunk of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlannedRow {
    pub(crate) slot: Slot,
    pub(crate) start: u32,
    pub(crate) len: u32,
    pub(crate) drafts: u8,
    /// Blocks to append to the table first.
    pub(crate) grow: u32,
}

/// A waiting request that starts to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Admission {
    pub(crate) slot: Slot,
    /// Blocks of its prefix hit.
    pub(crate) hits: u32,
    /// Blocks set aside, if it is guarded.
    pub(crate) reserve: u32,
}

impl Plan {
    /// Tokens forwarded.
    pub(crate) fn tokens(&self) -> u32 {
        self.rows.iter().map(|row| row.len + u32::from(row.drafts)).sum()
    }

    /// Rows up to the last that has drafts.
    pub(crate) fn draft_rows(&self) -> u32 {
        self.rows.iter().rposition(|row| row.drafts > 0).map_or(0, |last| last as u32 + 1)
    }

    /// Whether a row forwards several known tokens.
    pub(crate) fn has_chunk(&self) -> bool {
        self.rows.iter().any(|row| row.len > 1)
    }

    /// Whether a prompt started earlier goes on.
    pub(crate) fn has_partial(&self) -> bool {
        self.rows.len() > self.decodes + self.admit.len()
    }

    /// Withdraws passes 2 and 3: a lockstep group holds its prefill back.
    pub(crate) fn hold_prefill(&mut self) {
        self.rows.truncate(self.decodes);
        self.admit.clear();
        self.hits.clear();
    }

    fn clear(&mut self) {
        self.rows.clear();
        self.decodes = 0;
        self.admit.clear();
        self.hits.clear();
        self.preempt.clear();
        self.blocked = None;
        self.prefill_wanted = 0;
        self.others.clear();
        self.held.clear();
    }
}

/// How often the victims of a plan hold each block: shared blocks are freed by the last of them.
#[derive(Debug, Default)]
struct Held {
    counts: Vec<u32>,
    touched: Vec<BlockId>,
}

impl Held {
    /// Adds a victim; returns the blocks that become free.
    fn add(&mut self, request: &Request, kv: &KvCache) -> u32 {
        self.counts.resize(kv.counts().pool as usize, 0);
        let mut freed = 0;
        for &block in request.cold.table.blocks() {
            let count = &mut self.counts[block.0 as usize];
            *count += 1;
            freed += u32::from(*count == kv.refs(block));
            self.touched.push(block);
        }
        freed
    }

    fn clear(&mut self) {
        for block in self.touched.drain(..) {
            self.counts[block.0 as usize] = 0;
        }
    }
}

/// Decides what the executors of one replica run next. `plan` is an old plan whose buffers are reused.
///
/// Three passes over one token budget: decodes, then chunks of running requests, then admissions,
/// each in key order; the order of the passes is the order of the rows. Decodes that lack a block
/// preempt requests behind them; a plan that preempts admits nobody, or the victims' blocks would
/// go to a younger request. Admission stops at the first request that does not fit: nothing is
/// served past the head.
pub(crate) fn plan(state: &State, kv: &KvCache, limits: &Limits, mut plan: Plan) -> Plan {
    plan.clear();
    let blocks_left = kv.available() - state.reserved;
    let mut planner = Planner {
        state,
        kv,
        limits,
        budget: limits.tokens_per_step,
        blocks_left,
        victims_from: state.running.len(),
        plan,
    };
    if limits.mixed {
        planner.decode();
        let others = std::mem::take(&mut planner.plan.others);
        planner.resume(others.iter().copied());
        planner.plan.others = others;
        planner.admit();
    } else {
        planner.resume(0..state.running.len());
        planner.admit();
        if planner.plan.rows.is_empty() {
            planner.decode();
        }
    }
    planner.plan
}

struct Planner<'a> {
    state: &'a State,
    kv: &'a KvCache,
    limits: &'a Limits,
    /// Tokens left in the step.
    budget: u32,
    /// Free blocks that are neither reserved nor planned.
    blocks_left: u32,
    /// Unguarded requests from this place of the running line on are victims.
    victims_from: usize,
    plan: Plan,
}

impl Planner<'_> {
    /// Pass 1: one token, and drafts, for every request that waits for its next one.
    fn decode(&mut self) {
        let state = self.state;
        let mut has_room = true;
        for (place, slot) in state.running.slots().enumerate() {
            let request = &state.requests[slot];
            if !request.decodes() {
                self.plan.others.push(place);
            } else if has_room && !self.is_victim(place, request) {
                has_room = self.budget > 0 && self.decode_one(place, slot, request);
            }
        }
        self.plan.decodes = self.plan.rows.len();
    }

    /// Plans one decode; false if it has to give way to those before it.
    fn decode_one(&mut self, place: usize, slot: Slot, request: &Request) -> bool {
        let Some(row) = self.fit(place, slot, request) else {
            if !request.guarded {
                self.add_victim(place);
            }
            return false;
        };
        let own = row.grow.min(request.reserved);
        self.blocks_left -= row.grow - own;
        self.budget -= 1 + u32::from(row.drafts);
        self.plan.rows.push(row);
        true
    }

    /// The row of a decode, after dropping drafts and preempting others if it must; `None` if it
    /// still does not fit.
    fn fit(&mut self, place: usize, slot: Slot, request: &Request) -> Option<PlannedRow> {
        let row = |drafts: u32, grow| {
            let (start, drafts) = (request.computed, drafts as u8);
            PlannedRow { slot, start, len: 1, drafts, grow }
        };
        let drafts = self.drafts(request);
        let grow = self.growth(request, drafts);
        if grow <= self.blocks_left + request.reserved {
            return Some(row(drafts, grow));
        }
        let grow = self.growth(request, 0);
        while grow > self.blocks_left + request.reserved {
            let victim = (place + 1..self.victims_from)
                .rev()
                .find(|&other| !self.state.requests[self.state.running.get(other)].guarded)?;
            self.add_victim(victim);
        }
        Some(row(0, grow))
    }

    /// Drafts of a decode row. None before the seat has sampled in this epoch, nor where masks decide: they
    /// would have to be made for each draft.
    fn drafts(&self, request: &Request) -> u32 {
        if !request.drafted || request.masking.is_on() {
            return 0;
        }
        let last = request.limit.min(request.unmasked_below());
        let forgets = self.state.planted.has(Bug::LimitForgetsSlack);
        let slack = if forgets { 0 } else { u32::from(request.slack) };
        let room = last.saturating_sub(request.known() + slack + 1);
        u32::from(self.limits.drafts).min(room).min(self.budget - 1)
    }

    /// Blocks a decode appends to its table: enough even if every draft in flight is accepted.
    fn growth(&self, request: &Request, drafts: u32) -> u32 {
        let one = u32::from(!self.state.planted.has(Bug::BlockEdgeOffByOne));
        let forgets = self.state.planted.has(Bug::ReserveForgetsSlack);
        let slack = if forgets { 0 } else { u32::from(request.slack) };
        let positions = request.computed + slack + one + drafts;
        self.kv.blocks_for(positions).saturating_sub(request.blocks)
    }

    fn is_victim(&self, place: usize, request: &Request) -> bool {
        place >= self.victims_from && !request.guarded
    }

    fn add_victim(&mut self, place: usize) {
        let slot = self.state.running.get(place);
        self.blocks_left += self.plan.held.add(&self.state.requests[slot], self.kv);
        self.plan.preempt.push(slot);
        self.victims_from = place;
    }

    /// Pass 2: a chunk for every running request with several tokens to forward, of those at
    /// `places`. Its blocks were taken at admission.
    fn resume(&mut self, places: impl Iterator<Item = usize>) {
        let state = self.state;
        for place in places {
            let slot = state.running.get(place);
            let request = &state.requests[slot];
            if !request.resumes() || self.is_victim(place, request) {
                continue;
            }
            let (start, want) = (request.computed, request.want());
            let len = self.chunk(start, want);
            if len == 0 {
                break;
            }
            self.add_chunk(slot, start, want, len);
        }
    }

    /// Pass 3: waiting requests, until one does not fit. The whole known length gets its blocks
    /// now, so requests admitted in part cannot lock each other out.
    fn admit(&mut self) {
        if !self.plan.preempt.is_empty() || self.is_blocked() {
            return;
        }
        let state = self.state;
        let mut seats_left = state.seats_left();
        for slot in state.waiting.slots() {
            if seats_left == 0 || self.budget == 0 {
                break;
            }
            let request = &state.requests[slot];
            if self.admit_one(slot, request) {
                seats_left -= 1;
            } else if !state.planted.has(Bug::OvertakesBlockedHead) {
                break;
            }
        }
    }

    /// Whether looking up the head of the queue again is in vain. A hit costs less than last time
    /// only by what was published since and by idle blocks that others claimed meanwhile.
    fn is_blocked(&self) -> bool {
        let Some(blocked) = self.state.blocked else { return false };
        let head = self.state.waiting.slots().next();
        if head.is_none_or(|slot| self.state.requests[slot].id != blocked.request) {
            return false;
        }
        let published = self.kv.published() - blocked.published;
        let least = u64::from(blocked.need.saturating_sub(blocked.idle)).saturating_sub(published);
        u64::from(self.kv.available()) < least
    }

    fn admit_one(&mut self, slot: Slot, request: &Request) -> bool {
        let first_hit = self.plan.hits.len();
        let hit = if request.reads_cache() {
            self.kv.match_prefix(request.content(), &mut self.plan.hits)
        } else {
            kvcache::Hit::default()
        };
        let len = request.len;
        let now = self.kv.blocks_for(len);
        let whole = if request.guarded { self.kv.blocks_for(request.limit) } else { now };
        let idle = if self.state.planted.has(Bug::IdleHitsFree) { 0 } else { hit.idle };
        let need = whole - hit.blocks + idle;
        let start = hit.blocks * self.kv.block_tokens();
        let fits = need + self.headroom() <= self.blocks_left;
        let chunk = if fits { self.chunk(start, len - start) } else { 0 };
        if chunk == 0 {
            self.plan.hits.truncate(first_hit);
        }
        if !fits {
            let (request, published) = (request.id, self.kv.published());
            let blocked = Blocked { request, need, idle: hit.idle, published };
            // Admissions of this plan change what the next lookup finds: remember a head only.
            self.plan.blocked = self.plan.admit.is_empty().then_some(blocked);
        }
        if chunk == 0 {
            return false;
        }
        self.blocks_left -= need;
        self.plan.admit.push(Admission { slot, hits: hit.blocks, reserve: whole - now });
        self.add_chunk(slot, start, len - start, chunk);
        true
    }

    /// Blocks an admission leaves free, so that those who run can grow before anyone is preempted.
    fn headroom(&self) -> u32 {
        let running = (self.state.running.len() + self.plan.admit.len()) as u32;
        running.min(self.kv.counts().pool / 20)
    }

    fn add_chunk(&mut self, slot: Slot, start: u32, want: u32, len: u32) {
        self.budget = self.budget.saturating_sub(len);
        self.plan.prefill_wanted += u64::from(want);
        self.plan.rows.push(PlannedRow { slot, start, len, drafts: 0, grow: 0 });
    }

    fn chunk(&self, start: u32, want: u32) -> u32 {
        let whole = self.state.planted.has(Bug::ChunkOverBudget);
        let budget = if whole { self.limits.tokens_per_step } else { self.budget };
        let has_prefill = self.plan.rows.len() > self.plan.decodes;
        let cap = budget.min(self.limits.tokens_per_chunk.unwrap_or(u32::MAX));
        chunk(start, want, cap, self.limits.chunk_quantum(self.kv.block_tokens()), has_prefill)
    }
}

/// Tokens of the next prefill chunk `[start, start + len)` of a request that wants `want`, at most `cap`.
///
/// All of it if it fits. Else the chunk's *end* is aligned to `quantum`, so the next start is too.
/// A chunk that would not reach the next multiple is left for a later step, unless the step holds
/// no other prefill: decodes alone must never starve it.
fn chunk(start: u32, want: u32, cap: u32, quantum: u32, step_has_prefill: bool) -> u32 {
    if want <= cap {
        return want;
    }
    let end = (start + cap) / quantum * quantum;
    if end > start {
        end - start
    } else if step_has_prefill {
        0
    } else {
        cap
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
