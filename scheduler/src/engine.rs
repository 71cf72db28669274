//! The engine: `tick(now, inbox) -> effects`. The only place that sees messages and time.

use crate::apply::apply;
use crate::commit::{commit, launch};
use crate::domain::Domain;
use crate::lockstep::{self, Gate, Headers};
use crate::owners::{Owners, Place};
use crate::place::{Load, Placer};
use crate::plan::plan;
use crate::queue::{Backlog, refusal};
use crate::request::Request;
use crate::slab::Slot;
use crate::stats::Requeue;
use crate::{
    AbortCause, Control, Effect, EngineConfig, EngineError, ErrorCode, Event, Finish, Laps, Limits,
    Loss, Part, PromptHasher, Refusal, StepStats, StopReason, Submit, TokenEvent,
};
use kvcache::{Bug, KvCache};
use protocol::{Batch, Epoch, Replica, RequestId, StepOutput};
use std::ops::Range;

/// Schedules every replica and owns every KV block.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    domains: Vec<Domain>,
    owners: Owners,
    placer: Placer,
    gate: Gate,
    /// Submits accepted so far: the order of service.
    arrivals: u64,
    now_ms: u64,
    /// News collected in this tick and not yet handed out.
    news: Vec<TokenEvent>,
    ended: Vec<Slot>,
    was_idle: bool,
}

impl Engine {
    /// An idle engine.
    ///
    /// Errors: a limit out of range, or a pool that cannot hold one request of `max_model_len`.
    pub fn new(mut config: EngineConfig) -> Result<Self, EngineError> {
        config.validate()?;
        config.kv.planted = config.planted;
        let seats = config.limits.seats();
        if seats < config.limits.requests_running {
            let (asked, tokens) = (config.limits.requests_running, config.limits.tokens_per_step);
            tracing::warn!(asked, seats, tokens, "fewer seats: decodes must not fill a step");
        }
        config.limits.requests_running = seats;
        let domains = (0..config.replicas).map(|replica| Domain::new(Replica(replica), &config));
        let domains = domains.collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            config,
            domains,
            owners: Owners::default(),
            placer: Placer::default(),
            gate: Gate::default(),
            arrivals: 0,
            now_ms: 0,
            news: Vec::new(),
            ended: Vec::new(),
            was_idle: true,
        })
    }

    /// The function submitters compute `Submit::keys` with.
    pub fn hasher(&self) -> PromptHasher {
        PromptHasher::new(self.config.kv.hasher(), self.config.kv.caching)
    }

    /// The limits in force.
    pub fn limits(&self) -> &Limits {
        &self.config.limits
    }

    /// Generation of a replica's executor group; its outputs must carry it.
    pub fn epoch(&self, replica: Replica) -> Epoch {
        self.domains[usize::from(replica.0)].epoch
    }

    /// Replicas that step together with this one, itself among them: they are lost together.
    pub fn group(&self, replica: Replica) -> impl Iterator<Item = Replica> + use<> {
        self.group_of(usize::from(replica.0)).map(|index| Replica(index as u16))
    }

    /// The KV cache of a replica, for those who check or list it.
    pub fn kv(&self, replica: Replica) -> &KvCache {
        &self.domains[usize::from(replica.0)].kv
    }

    /// Whether no request is live and no step is in flight.
    pub fn is_idle(&self) -> bool {
        self.domains.iter().all(|domain| domain.state.is_idle())
    }

    /// Takes everything out of `inbox`, decides, and appends what is to be done to `effects`.
    ///
    /// `now_ms` only measures queueing, losses and stays of blocks; it decides no plan.
    pub fn tick(&mut self, now_ms: u64, inbox: &mut Vec<Event>, effects: &mut Vec<Effect>) {
        self.tick_timed(now_ms, inbox, effects, &mut ());
    }

    /// The same, and `laps` hears when each part of it is over.
    pub fn tick_timed(
        &mut self,
        now_ms: u64,
        inbox: &mut Vec<Event>,
        effects: &mut Vec<Effect>,
        laps: &mut dyn Laps,
    ) {
        self.now_ms = self.now_ms.max(now_ms);
        self.domains.iter_mut().for_each(|domain| domain.kv.set_time(self.now_ms));
        for event in inbox.drain(..) {
            self.take_in(event, effects);
        }
        self.expire_losses();
        laps.lap(Part::Apply);
        for group in self.groups() {
            while self.step(group.clone(), effects, laps) {}
        }
        self.hand_out(effects);
        let idle = self.is_idle();
        if idle && !self.was_idle {
            self.check_requests();
        }
        self.was_idle = idle;
    }

    fn take_in(&mut self, event: Event, effects: &mut Vec<Effect>) {
        match event {
            Event::Submit(submit) => self.submit(*submit),
            Event::Abort { request, cause } => self.abort(request, cause),
            Event::Control(Control::ClearPrefixCache { op_id, restart }) => {
                let done = self.clear_prefix_cache(restart);
                effects.push(Effect::ControlDone { op_id, done });
            }
            Event::Output { replica, output } => self.output(replica, output),
            Event::Lost { replica, loss } => self.lost(replica, loss),
            Event::Ready { replica, blocks, graph_rows } => {
                self.ready(replica, blocks, graph_rows, effects);
            }
            Event::MaskMade { request, outputs, ahead } => self.mask_made(request, outputs, ahead),
            Event::MasksOver { request } => self.masks_over(request),
        }
    }

    fn mask_made(&mut self, id: RequestId, outputs: u32, ahead: bool) {
        let Some(&Place { replica, slot }) = self.owners.get(&id) else { return };
        let request = &mut self.domains[replica].state.requests[slot];
        if request.len - request.cold.prompt_len == outputs {
            request.masking.made(ahead);
        }
    }

    fn masks_over(&mut self, id: RequestId) {
        if let Some(&Place { replica, slot }) = self.owners.get(&id) {
            self.domains[replica].state.requests[slot].masking.end();
        }
    }

    /// Forgets every cached prefix; false if requests hold blocks and shall not be restarted.
    fn clear_prefix_cache(&mut self, restart: bool) -> bool {
        let held = self.domains.iter().any(|domain| domain.kv.counts().in_use > 0);
        if held && !restart {
            return false;
        }
        for domain in &mut self.domains {
            domain.requeue_running(Requeue::Reset);
            domain.kv.clear();
            domain.changed = true;
        }
        true
    }

    fn submit(&mut self, submit: Submit) {
        let taken = self.owners.contains_key(&submit.id);
        assert!(!taken, "request ids are unique, {:?} is live", submit.id);
        if let Some(refusal) = self.refusal(&submit) {
            let request = submit.id;
            self.news.push(TokenEvent::end(request, Finish::Refused(Box::new(refusal))));
            return;
        }
        let replica = self.place(&submit);
        self.arrivals += 1;
        let request = Request::new(submit, self.arrivals, self.now_ms, &self.config);
        self.enqueue(replica, request);
    }

    fn refusal(&self, submit: &Submit) -> Option<Refusal> {
        let pools = self.domains.iter().map(|domain| domain.kv.counts().pool);
        let backlog = Backlog {
            requests: self.domains.iter().map(|d| d.state.waiting.len() as u32).sum(),
            tokens: self.domains.iter().map(|d| d.state.waiting_tokens).sum(),
        };
        refusal(submit, &self.config, pools.min().unwrap_or(0), backlog)
    }

    fn place(&mut self, submit: &Submit) -> usize {
        if self.domains.len() == 1 {
            return 0;
        }
        let candidates: Vec<_> = self.domains.iter().map(Domain::candidate).collect();
        let replica = self.placer.place(submit, self.config.routing, &candidates);
        usize::from(replica.0)
    }

    /// Puts a request that holds nothing into a replica's queue.
    fn enqueue(&mut self, replica: usize, mut request: Request) {
        let domain = &mut self.domains[replica];
        if self.config.kv.caching {
            request.extend_keys(&domain.state.hasher);
        }
        domain.load.charge(request.cold.asked.charge);
        domain.changed = true;
        let id = request.id;
        let slot = domain.state.enqueue(request);
        self.owners.insert(id, Place { replica, slot });
    }

    /// Ends a request at once, wherever it is: its blocks are free before the next plan, and what
    /// is in flight for it will be dropped.
    fn abort(&mut self, id: RequestId, cause: AbortCause) {
        let finish = match cause {
            AbortCause::StopText => Finish::Stop(StopReason::Text),
            cause => Finish::Abort(cause),
        };
        self.end(id, finish);
    }

    fn end(&mut self, id: RequestId, finish: Finish) {
        let Some(&Place { replica, slot }) = self.owners.get(&id) else { return };
        let Domain { state, kv, load, changed, .. } = &mut self.domains[replica];
        let request = &mut state.requests[slot];
        let key = request.cold.key;
        if request.seat.is_some() {
            #[cfg(feature = "planted")]
            if self.config.planted.has(Bug::AbortLeaksBlock) {
                request.leak(kv);
            }
            state.running.remove(key);
            state.release(slot, kv);
        } else {
            if self.config.planted.has(Bug::LostAbort) {
                return;
            }
            state.waiting_tokens -= u64::from(request.len);
            state.waiting.remove(key);
        }
        let mut request = state.requests.remove(slot);
        load.release(request.cold.asked.charge);
        *changed = true;
        self.owners.remove(&id);
        request.tell(&mut self.news).finish = Some(finish);
    }

    fn output(&mut self, replica: Replica, output: StepOutput) {
        let domain = &mut self.domains[usize::from(replica.0)];
        domain.changed = true;
        if output.epoch != domain.epoch || !domain.is_ready() {
            domain.state.totals.outputs_dropped += 1;
            return;
        }
        domain.timing = output.timing;
        let Domain { state, kv, .. } = domain;
        apply(state, kv, &self.config.limits, output, &mut self.news, &mut self.ended);
        if !self.ended.is_empty() {
            self.forget_ended(usize::from(replica.0));
        }
        let domain = &self.domains[usize::from(replica.0)];
        domain.state.check_counters(&domain.kv, self.config.limits.requests_running);
    }

    /// Drops the requests that `apply` ended; their blocks and seats are free already.
    fn forget_ended(&mut self, replica: usize) {
        let Domain { state, load, .. } = &mut self.domains[replica];
        for slot in self.ended.drain(..) {
            let request = state.requests.remove(slot);
            load.release(request.cold.asked.charge);
            self.owners.remove(&request.id);
        }
        let requests = &state.requests;
        state.running.retain(|slot| requests.get(slot).is_some());
    }

    /// In lockstep one lost replica ends the whole group. Requests of independent replicas move to
    /// those that are left.
    fn lost(&mut self, replica: Replica, loss: Loss) {
        let replica = usize::from(replica.0);
        let spares = self.config.planted.has(Bug::LossSparesPeers);
        for lost in self.group_of(replica).filter(|&lost| lost == replica || !spares) {
            self.domains[lost].lose(self.now_ms, loss);
        }
        self.move_queue(replica);
    }

    /// Sends what waits for a lost replica to those that are left, as far as they can hold it. Ranks
    /// of a lockstep group have nobody to move to.
    fn move_queue(&mut self, from: usize) {
        if self.config.lockstep || self.domains[from].is_ready() {
            return;
        }
        let waiting: Vec<Slot> = self.domains[from].state.waiting.slots().collect();
        for slot in waiting {
            self.move_on(from, slot);
        }
    }

    /// Sends a waiting request to the least loaded ready replica that can ever hold it, unless it
    /// is pinned; whether there was one. Pools differ once executors came back with less memory.
    fn move_on(&mut self, from: usize, slot: Slot) -> bool {
        let request = &self.domains[from].state.requests[slot];
        let (limit, pinned) = (request.limit, request.cold.asked.pinned);
        let holds = |&i: &usize| i != from && self.domains[i].is_ready() && self.holds(i, limit);
        let refuges = (0..self.domains.len()).filter(holds);
        let least = refuges.min_by_key(|&i| (self.domains[i].load.tokens, i));
        let Some(to) = least.filter(|_| !pinned) else { return false };
        let Domain { state, load, changed, .. } = &mut self.domains[from];
        let request = state.requests.remove(slot);
        state.waiting.remove(request.cold.key);
        state.waiting_tokens -= u64::from(request.len);
        load.release(request.cold.asked.charge);
        *changed = true;
        self.enqueue(to, request);
        true
    }

    /// Whether a replica's pool can hold a request that reaches `limit` tokens.
    fn holds(&self, replica: usize, limit: u32) -> bool {
        let kv = &self.domains[replica].kv;
        kv.blocks_for(limit) <= kv.counts().pool
    }

    /// A lost replica is back. What no longer fits its pool moves on or ends; the queues of replicas
    /// that are still lost may come to it.
    fn ready(
        &mut self,
        replica: Replica,
        blocks: u32,
        graph_rows: Vec<u32>,
        effects: &mut Vec<Effect>,
    ) {
        let domain = &mut self.domains[usize::from(replica.0)];
        if domain.is_ready() {
            return;
        }
        flush_events(replica, domain, effects);
        domain.restore(&self.config.kv, blocks, graph_rows);
        domain.kv.set_time(self.now_ms);
        let index = usize::from(replica.0);
        let state = &self.domains[index].state;
        let waiting = state.waiting.slots().map(|slot| (slot, &state.requests[slot]));
        let too_large = waiting.filter(|(_, request)| !self.holds(index, request.limit));
        let too_large: Vec<_> = too_large.map(|(slot, request)| (slot, request.id)).collect();
        for (slot, id) in too_large {
            if self.config.lockstep || !self.move_on(index, slot) {
                self.end(id, Finish::Error(ErrorCode::EngineUnavailable));
            }
        }
        for lost in 0..self.domains.len() {
            self.move_queue(lost);
        }
    }

    /// Fails the requests of replicas that have been away for too long.
    fn expire_losses(&mut self) {
        let timeout = self.config.limits.loss_timeout_ms;
        for replica in 0..self.domains.len() {
            let domain = &self.domains[replica];
            let expired = |since: u64| self.now_ms.saturating_sub(since) >= timeout;
            if !domain.lost_at_ms.is_some_and(expired) || domain.state.waiting.is_empty() {
                continue;
            }
            let waiting = domain.state.waiting.slots();
            let ids: Vec<_> = waiting.map(|slot| domain.state.requests[slot].id).collect();
            for id in ids {
                self.end(id, Finish::Error(ErrorCode::EngineUnavailable));
            }
        }
    }

    /// Replicas that step together.
    fn groups(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let count = self.domains.len();
        let size = if self.config.lockstep { count } else { 1 };
        (0..count).step_by(size).map(move |first| first..first + size)
    }

    fn group_of(&self, replica: usize) -> Range<usize> {
        if self.config.lockstep { 0..self.domains.len() } else { replica..replica + 1 }
    }

    /// Plans and sends one step of a group; whether another one may follow at once.
    fn step(
        &mut self,
        group: Range<usize>,
        effects: &mut Vec<Effect>,
        laps: &mut dyn Laps,
    ) -> bool {
        let limits = &self.config.limits;
        let domains = &mut self.domains[group.clone()];
        let room = |d: &Domain| d.state.flights.len() < limits.steps_in_flight as usize;
        let incomplete = self.config.planted.has(Bug::GroupRunsIncomplete);
        if !domains.iter().all(|domain| (domain.is_ready() || incomplete) && room(domain)) {
            return false;
        }
        for domain in &mut *domains {
            let recycled = std::mem::take(&mut domain.plan);
            domain.plan = plan(&domain.state, &domain.kv, limits, recycled);
        }
        if self.config.lockstep && self.config.prefill_gate {
            let for_ever = self.config.planted.has(Bug::GateHoldsForever);
            lockstep::hold_prefill(&mut self.gate, domains, limits, for_ever);
        }
        laps.lap(Part::Plan);
        let sends = domains.iter().any(|domain| !domain.plan.rows.is_empty());
        // Victims without a row to run: their blocks may let the head of the queue in.
        let again = sends || domains.iter().any(|domain| !domain.plan.preempt.is_empty());
        let Headers { bucket, moe_tokens, draft_rows } = lockstep::headers(domains, limits);
        let shared = |count: u32| if self.config.lockstep { count } else { 0 };
        let (moe_tokens, draft_rows) = (shared(moe_tokens), shared(draft_rows));
        for (i, domain) in group.zip(domains) {
            let Domain { state, kv, plan, .. } = domain;
            commit(state, kv, plan, self.now_ms);
            let idle = state.planted.has(Bug::IdleRankGetsNoBatch) && plan.rows.is_empty();
            let alone = state.planted.has(Bug::RankPadsAlone);
            let moe_tokens = if alone { moe_tokens.min(plan.tokens()) } else { moe_tokens };
            if sends && !idle {
                let rows = launch(state, kv, &plan.rows, self.config.limits.histories);
                domain.note_step();
                let (step, epoch) = (domain.state.step, domain.epoch);
                let batch = Batch { step, epoch, bucket, moe_tokens, draft_rows, rows };
                effects.push(Effect::Send { replica: Replica(i as u16), batch });
            }
        }
        laps.lap(Part::Commit);
        again
    }

    /// Hands out what this tick collected: news, index changes, counters.
    fn hand_out(&mut self, effects: &mut Vec<Effect>) {
        if !self.news.is_empty() {
            let capacity = self.news.len();
            let news = std::mem::replace(&mut self.news, Vec::with_capacity(capacity));
            effects.push(Effect::Tokens(news));
        }
        for (i, domain) in self.domains.iter_mut().enumerate() {
            let replica = Replica(i as u16);
            flush_events(replica, domain, effects);
            if std::mem::take(&mut domain.changed) {
                effects.push(Effect::Stats(domain.stats(replica)));
            }
        }
    }

    /// Counters of a replica, as its next `Effect::Stats` tells them.
    pub fn stats(&self, replica: Replica) -> StepStats {
        self.domains[usize::from(replica.0)].stats(replica)
    }

    /// Recomputes every counter and reference from its owners; panics if one is wrong. Goes through every block of every pool.
    pub fn check(&self) {
        for domain in &self.domains {
            domain.kv.check(domain.state.tables());
        }
        self.check_requests();
    }

    /// Recomputes what requests and seats are counted by: no more than these, however many blocks there are, because the
    /// next request waits for it.
    fn check_requests(&self) {
        let mut live = 0;
        for (replica, domain) in self.domains.iter().enumerate() {
            domain.state.check(&domain.kv, self.config.limits.requests_running);
            let mut load = Load::default();
            for (slot, request) in domain.state.requests.iter() {
                let place = self.owners.get(&request.id);
                assert_eq!(place, Some(&Place { replica, slot }), "{:?} is lost", request.id);
                load.charge(request.cold.asked.charge);
                live += 1;
            }
            assert_eq!(load, domain.load, "load of replica {replica} miscounted");
        }
        assert_eq!(live, self.owners.len(), "a request that ended is still known");
    }
}

/// Hands out the changes of a replica's prefix index, and what is known of blocks that left it.
fn flush_events(replica: Replica, domain: &mut Domain, effects: &mut Vec<Effect>) {
    if domain.kv.has_events() {
        effects.push(Effect::Kv { replica, events: domain.kv.take_events() });
    }
    if domain.kv.has_stays() {
        effects.push(Effect::Evicted { replica, stays: domain.kv.take_stays() });
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
