//! Applies and checks the scheduler's effects in the simulation: KV events go to the subscribers, tokens to
//! the clients, and batches to the executors.

use crate::batch_checks::{RequestLengthLimits, check_lockstep};
use crate::client::ClientStage;
use crate::hash_model::text::HashGrammar;
use crate::invariant::{CheckResult, InvariantViolation, ensure};
use crate::mask_worker::MaskedRowGrammar;
use crate::request_generator::masked_range;
use crate::trace_format;
use crate::world::SimWorld;
use protocol::{Batch, Replica, RowInput, StateSlotAccess};
use scheduler::{
    BlockLifetime, FinishReason, LifetimeSampleRate, SchedulerEffect, SchedulerStats, StopReason,
    TokenEvent,
};

impl SimWorld {
    /// Applies the effects of one tick: KV events, then token events, then all other effects.
    pub(crate) fn apply_effects(&mut self, effects: &mut Vec<SchedulerEffect>) -> CheckResult {
        if self.config.scheduler.lockstep {
            let sent = effects.iter().filter_map(|effect| match effect {
                SchedulerEffect::SendBatch { batch, .. } => Some(batch),
                _ => None,
            });
            check_lockstep(&sent.collect::<Vec<_>>(), &self.config)?;
        }
        // KV events and token events are applied first, because the checks of this tick's batches depend on
        // them.
        effects.sort_by_key(|effect| match effect {
            SchedulerEffect::KvEvents { .. } => 0,
            SchedulerEffect::TokenEvents(_) => 1,
            _ => 2,
        });
        for effect in effects.drain(..) {
            match effect {
                SchedulerEffect::KvEvents { replica, events } => {
                    let size = self.config.block_tokens();
                    let kinds: Vec<_> = self.config.kv_kinds().collect();
                    for event in &events {
                        self.trace.line(|| trace_format::format_kv_event(replica.0, event));
                        self.replicas[usize::from(replica.0)].mirror.apply(event, size, &kinds)?;
                    }
                    if let Some(subscriber) = &mut self.replicas[usize::from(replica.0)].subscriber
                    {
                        subscriber.publish(&events);
                    }
                    let numbers = [u64::from(replica.0), events.len() as u64];
                    self.trace.record(self.now_ms, "kv", &numbers);
                }
                SchedulerEffect::TokenEvents(events) => {
                    events.iter().try_for_each(|event| self.deliver_token_event(event))?;
                }
                SchedulerEffect::SendBatch { replica, batch } => self.send_batch(replica, batch)?,
                SchedulerEffect::BlocksEvicted { replica, lifetimes } => {
                    self.record_evictions(replica, &lifetimes)?;
                }
                SchedulerEffect::Stats(stats) => self.check_stats(stats)?,
                SchedulerEffect::ControlDone { op_id, succeeded: done } => {
                    self.trace.record(self.now_ms, "control", &[op_id, done.into()]);
                }
            }
        }
        self.replicas.iter_mut().for_each(|replica_state| replica_state.mirror.end_tick());
        self.check_lifetimes()
    }

    fn deliver_token_event(&mut self, event: &TokenEvent) -> CheckResult {
        let index = (event.request.0 as usize).wrapping_sub(1);
        let known = index < self.clients.len();
        ensure!("I9", known, "event of unknown request {}", event.request.0);
        let finish = event.finish_reason.as_ref().map_or(0, |_| 1);
        let numbers = [event.request.0, event.tokens.len() as u64, finish];
        self.trace.record(self.now_ms, "tokens", &numbers);
        self.trace.mix_into_hash(event.tokens.iter().map(|&token| token.into()));
        self.trace.line(|| trace_format::format_token_event(event));
        self.counts.tokens += event.tokens.len() as u64;
        self.counts.rejected +=
            u64::from(matches!(event.finish_reason, Some(FinishReason::Rejected(_))));
        self.clients[index].take_token_event(event, &self.config)?;
        if !event.tokens.is_empty() {
            self.begin_mask_ahead(index);
            self.end_masks(index);
        }
        if matches!(
            event.finish_reason,
            Some(
                FinishReason::Length
                    | FinishReason::Stop(StopReason::StopToken(_) | StopReason::Pooled)
            )
        ) {
            self.check_blocks_stay_cached(index, event.preemptions)?;
        }
        Ok(())
    }

    fn send_batch(&mut self, replica: Replica, batch: Batch) -> CheckResult {
        let (index, step) = (usize::from(replica.0), batch.step.0);
        let (rows, epoch) = (batch.rows.len() as u64, self.scheduler.epoch(replica));
        self.counts.steps += 1;
        self.counts.rows += rows;
        if self.config.scheduler.lockstep && self.replicas.len() == 8 {
            self.counts.batches_of_eight += 1;
            self.counts.idle_of_eight += u64::from(rows == 0);
        }
        let numbers = [u64::from(replica.0), step, rows];
        self.trace.record(self.now_ms, "batch", &numbers);
        for row in &batch.rows {
            let forks = |access: &StateSlotAccess| access.read.is_some_and(|r| r != access.write);
            self.counts.forks += u64::from(row.state_slots.iter().any(forks));
            let resumes = row.seq_init.is_some() && row.start > 0 && !row.state_slots.is_empty();
            self.counts.resumed_states += u64::from(resumes);
            let slots = row.state_slots.iter().flat_map(|access| [access.read, Some(access.write)]);
            self.trace.mix_into_hash(slots.map(|slot| slot.map_or(u64::MAX, |slot| slot.0.into())));
            let (request, seq_slot) = (row.request.0, row.seq_slot.0);
            let numbers = [request, seq_slot.into(), row.start.into(), row.len.into()];
            self.trace.record(self.now_ms, "row", &numbers);
            let blocks = row.table_updates.iter().flat_map(|update| &update.blocks);
            self.trace.mix_into_hash(blocks.map(|block| block.0.into()));
            self.trace.line(|| trace_format::format_row(row));
        }
        let replica_state = &mut self.replicas[index];
        ensure!(
            "I16",
            replica_state.failed_at_ms.is_none(),
            "step {step} is sent to failed replica {index}"
        );
        ensure!("I16", batch.epoch == epoch, "step {step} of {:?}, now {epoch:?}", batch.epoch);
        let clients = &self.clients;
        for row in &batch.rows {
            let client = &clients[row.request.0 as usize - 1];
            let (id, stage) = (row.request.0, client.stage);
            ensure!("I9", stage == ClientStage::Live, "request {id} runs, {stage:?}");
            let wanted = client.submit.replica.unwrap_or(replica);
            ensure!("F38", wanted == replica, "request {id} runs on {replica:?}, not {wanted:?}");
            let init =
                row.seq_init.as_ref().filter(|_| self.config.scheduler.limits.needs_token_history);
            let complete = init.is_none_or(|init| init.token_history == client.known_tokens);
            ensure!(
                "I7",
                complete,
                "request {id}: its sequence slot starts with history {:?}",
                init.map(|i| &i.token_history)
            );
        }
        replica_state.batch_checker.check(&batch, &self.config, |row| {
            let client = &clients[row.request.0 as usize - 1];
            RequestLengthLimits { max_len: client.limit(), forwarded_len: client.forwarded_limit() }
        })?;
        let (pool_blocks, given) =
            (self.scheduler.kv(replica).counts().pool, replica_state.kv_bytes);
        replica_state.batch_checker.check_memory(&batch, &self.config, pool_blocks, given)?;
        self.counts.mla_rows += if self.config.has_mla() { rows } else { 0 };
        self.counts.unequal_block_rows += if self.config.block_bytes_differ() { rows } else { 0 };
        self.check_service_order(index, &batch)?;
        self.check_prefix_hits(index, &batch)?;
        let grammars = self.grammars_for(&batch)?;
        self.counts.masked_rows += grammars.len() as u64;
        let at_ms = self.send_leaves_ms() + self.link_delay_ms();
        self.replicas[index].watch.batch_sent(&batch, self.now_ms);
        match &mut self.replicas[index].executor {
            Some(executor) if executor.link_broken => self.count_lost_frame(index),
            Some(executor) => executor.send(batch, grammars, at_ms),
            None => {}
        }
        Ok(())
    }

    /// Returns the grammars of the rows of a batch that are sampled under a grammar bitmask (masked rows), in
    /// the state after the tokens that the clients have received. Checks I21: exactly the rows that need a
    /// bitmask are masked, and a masked row is sent only when the preceding token is known. An unmasked row
    /// has no draft token at a position that needs a bitmask.
    fn grammars_for(&mut self, batch: &Batch) -> Result<Vec<MaskedRowGrammar>, InvariantViolation> {
        let mut grammars = Vec::new();
        for (index, row) in (0..).zip(&batch.rows) {
            let (id, client) = (row.request.0, &self.clients[row.request.0 as usize - 1]);
            let prompt_len = client.submit.tokens.len();
            let outputs = (row.start + row.len).saturating_sub(prompt_len as u32);
            let limited =
                masked_range(&client.submit).filter(|_| row.samples).unwrap_or(u32::MAX..u32::MAX);
            // After the last output token that the grammar restricts, rows may still be sampled under a
            // bitmask (which allows all ids) until the scheduler receives `MasksDone`.
            let valid =
                if row.masked { outputs >= limited.start } else { !limited.contains(&outputs) };
            ensure!(
                "I21",
                valid,
                "request {id}: masked {} at {outputs} of {limited:?}",
                row.masked
            );
            if !row.masked {
                let last = outputs + row.input.draft_slack() + u32::from(row.drafts);
                let free = limited.start > last || outputs >= limited.end;
                ensure!("I21", free, "request {id}: drafts up to {last} of {limited:?}");
                continue;
            }
            let seen = !matches!(row.input, RowInput::SampledAt { .. });
            let known = client.known_tokens.len() as u32;
            ensure!("I21", seen, "request {id} is masked after an unknown token");
            ensure!(
                "I21",
                row.start + row.len == known,
                "request {id} is masked at a wrong position"
            );
            let vocab = self.config.scheduler.limits.vocab_size;
            let mut grammar = HashGrammar::new(client.submit.rng_key, vocab);
            client.known_tokens[prompt_len..].iter().for_each(|&token| grammar.observe(token));
            let ready_max = usize::MAX;
            grammars.push(MaskedRowGrammar { row: index, grammar, outputs, limited, ready_max });
        }
        for grammar in &mut grammars {
            let row = &batch.rows[grammar.row as usize];
            let is_overdue = self.mask_is_overdue(row.request);
            grammar.ready_max = if is_overdue { 0 } else { self.draft_masks_ready(row.drafts) };
        }
        Ok(grammars)
    }

    /// Checks I22: the reported lifetimes of evicted blocks have consistent times.
    fn record_evictions(&mut self, replica: Replica, lifetimes: &[BlockLifetime]) -> CheckResult {
        for lifetime in lifetimes {
            let BlockLifetime { lifetime_ms, idle_ms, reuse_gaps_ms: gaps_ms } = lifetime;
            let within = idle_ms + gaps_ms.iter().sum::<u64>();
            ensure!("I22", within <= *lifetime_ms && gaps_ms.len() <= 3, "{lifetime:?}");
            ensure!("I22", *lifetime_ms <= self.now_ms, "{lifetime:?} at {}", self.now_ms);
        }
        self.replicas[usize::from(replica.0)].lifetimes += lifetimes.len() as u64;
        self.trace.record(self.now_ms, "evicted", &[u64::from(replica.0), lifetimes.len() as u64]);
        Ok(())
    }

    /// Checks I22: if all blocks are sampled, a lifetime is reported for every eviction; if no block is
    /// sampled, no lifetime is reported.
    fn check_lifetimes(&self) -> CheckResult {
        let sample_rate = self.config.scheduler.kv.lifetime_sample;
        for (replica, replica_state) in self.replicas.iter().enumerate() {
            let (lifetimes, removed) = (replica_state.lifetimes, replica_state.mirror.removed);
            let valid = match sample_rate {
                None => lifetimes == 0,
                all if all == LifetimeSampleRate::new(1.0) => lifetimes == removed,
                Some(_) => lifetimes <= removed,
            };
            ensure!(
                "I22",
                valid,
                "replica {replica}: {lifetimes} lifetimes, {removed} evictions, rate {sample_rate:?}"
            );
        }
        Ok(())
    }

    /// Checks I1 (block counts) and I8 (budgets) against the scheduler's own counters.
    fn check_stats(&mut self, stats: SchedulerStats) -> CheckResult {
        let (blocks, limits) = (stats.blocks, &self.config.scheduler.limits);
        let sum = blocks.free + blocks.cached + blocks.in_use;
        ensure!("I1", sum == blocks.pool, "{blocks:?}");
        ensure!("I1", blocks.reserved <= blocks.free + blocks.cached, "{blocks:?}");
        let (running, max_num_seqs) = (stats.running, limits.max_num_seqs);
        ensure!(
            "I8",
            running <= max_num_seqs,
            "{running} requests in {max_num_seqs} sequence slots"
        );
        let replica_state = &mut self.replicas[usize::from(stats.replica.0)];
        let before = &replica_state.stats;
        let grows = stats.steps_total >= before.steps_total
            && stats.preemptions_total >= before.preemptions_total
            && stats.generated_tokens_total >= before.generated_tokens_total
            && stats.outputs_dropped_total >= before.outputs_dropped_total;
        ensure!("I10", grows, "totals shrink: {before:?}, then {stats:?}");
        let drafts = &stats.drafts_total;
        let accepted: u64 = drafts.accepted_per_position.iter().sum();
        // A draft token is accepted only if all earlier draft tokens are accepted, so the number of accepted
        // draft tokens cannot increase with the position.
        let falling = drafts.accepted_per_position.is_sorted_by(|a, b| a >= b);
        let most = drafts.draft_rows * u64::from(limits.draft_tokens);
        let valid = falling && accepted <= drafts.draft_tokens && drafts.draft_tokens <= most;
        ensure!("I10", valid, "{drafts:?} with up to {} draft tokens per row", limits.draft_tokens);
        replica_state.stats = stats;
        Ok(())
    }
}
