//! What the engine decided meets the world: events the subscribers, tokens the clients, batches the
//! executors. Each is checked on the way.

use crate::batch_checks::check_lockstep;
use crate::broken::{Broken, Checked, ensure};
use crate::client::Stage;
use crate::hash_model::text::Grammar;
use crate::requests::masked;
use crate::show;
use crate::world::World;
use protocol::{Batch, Input, MaskRow, Replica};
use scheduler::{Effect, Finish, Share, Stay, StepStats, StopReason, TokenEvent};

impl World {
    /// Takes the effects of one tick, in order.
    pub(crate) fn absorb(&mut self, effects: &mut Vec<Effect>) -> Checked {
        if self.setup.engine.lockstep {
            let sent = effects.iter().filter_map(|effect| match effect {
                Effect::Send { replica, batch } => Some((usize::from(replica.0), batch)),
                _ => None,
            });
            check_lockstep(&sent.collect::<Vec<_>>(), &self.setup)?;
        }
        // What changed in the index and what clients know comes first: batches build on it.
        effects.sort_by_key(|effect| match effect {
            Effect::Kv { .. } => 0,
            Effect::Tokens(_) => 1,
            _ => 2,
        });
        for effect in effects.drain(..) {
            match effect {
                Effect::Kv { replica, events } => {
                    let size = self.setup.block_tokens();
                    for event in &events {
                        self.trace.line(|| show::change(replica.0, event));
                        self.sites[usize::from(replica.0)].mirror.apply(event, size)?;
                    }
                    if let Some(subscriber) = &mut self.sites[usize::from(replica.0)].subscriber {
                        subscriber.publish(&events);
                    }
                    let numbers = [u64::from(replica.0), events.len() as u64];
                    self.trace.note(self.now_ms, "kv", &numbers);
                }
                Effect::Tokens(news) => {
                    news.iter().try_for_each(|event| self.hear(event))?;
                }
                Effect::Send { replica, batch } => self.send(replica, batch)?,
                Effect::Evicted { replica, stays } => self.evicted(replica, &stays)?,
                Effect::Stats(stats) => self.count(stats)?,
                Effect::ControlDone { op_id, done } => {
                    self.trace.note(self.now_ms, "control", &[op_id, done.into()]);
                }
            }
        }
        self.sites.iter_mut().for_each(|site| site.mirror.end_tick());
        self.check_stays()
    }

    fn hear(&mut self, event: &TokenEvent) -> Checked {
        let index = (event.request.0 as usize).wrapping_sub(1);
        let known = index < self.clients.len();
        ensure!("I9", known, "news of request {}, which nobody asked", event.request.0);
        let finish = event.finish.as_ref().map_or(0, |_| 1);
        let numbers = [event.request.0, event.tokens.len() as u64, finish];
        self.trace.note(self.now_ms, "tokens", &numbers);
        self.trace.mix(event.tokens.iter().map(|&token| token.into()));
        self.trace.line(|| show::news(event));
        self.tally.tokens += event.tokens.len() as u64;
        self.tally.refused += u64::from(matches!(event.finish, Some(Finish::Refused(_))));
        self.clients[index].hear(event, &self.setup)?;
        if !event.tokens.is_empty() {
            self.make_mask_ahead(index);
            self.end_masks(index);
        }
        if matches!(event.finish, Some(Finish::Length | Finish::Stop(StopReason::Id(_)))) {
            self.check_found_again(index)?;
        }
        Ok(())
    }

    fn send(&mut self, replica: Replica, batch: Batch) -> Checked {
        let (index, step) = (usize::from(replica.0), batch.step.0);
        let (rows, epoch) = (batch.rows.len() as u64, self.engine.epoch(replica));
        self.tally.steps += 1;
        self.tally.rows += rows;
        if self.setup.engine.lockstep && self.sites.len() == 8 {
            self.tally.batches_of_eight += 1;
            self.tally.idle_of_eight += u64::from(rows == 0);
        }
        let numbers = [u64::from(replica.0), step, rows];
        self.trace.note(self.now_ms, "batch", &numbers);
        for row in &batch.rows {
            let (request, seat) = (row.request.0, row.seat.0);
            let numbers = [request, seat.into(), row.start.into(), row.len.into()];
            self.trace.note(self.now_ms, "row", &numbers);
            let blocks = row.tables.iter().flat_map(|update| &update.blocks);
            self.trace.mix(blocks.map(|block| block.0.into()));
            self.trace.line(|| show::row(row));
        }
        let site = &mut self.sites[index];
        ensure!("I16", site.lost_at_ms.is_none(), "step {step} is sent to dead replica {index}");
        ensure!("I16", batch.epoch == epoch, "step {step} of {:?}, now {epoch:?}", batch.epoch);
        let clients = &self.clients;
        for row in &batch.rows {
            let client = &clients[row.request.0 as usize - 1];
            let (id, stage) = (row.request.0, client.stage);
            ensure!("I9", stage == Stage::Live, "request {id} runs, {stage:?}");
            let wanted = client.submit.replica.unwrap_or(replica);
            ensure!("F38", wanted == replica, "request {id} runs on {replica:?}, not {wanted:?}");
            let init = row.init.as_ref().filter(|_| self.setup.engine.limits.histories);
            let told = init.is_none_or(|init| init.history == client.text);
            ensure!(
                "I7",
                told,
                "request {id}: its seat begins with {:?}",
                init.map(|i| &i.history)
            );
        }
        site.told.check(&batch, &self.setup, |row| {
            let client = &clients[row.request.0 as usize - 1];
            (client.limit(), client.forwarded())
        })?;
        self.check_order(index, &batch)?;
        self.check_hits(index, &batch)?;
        let masks = self.masks(&batch)?;
        self.tally.masked_rows += masks.len() as u64;
        let at_ms = self.leaves_ms() + self.link_delay_ms();
        self.sites[index].vigil.sent(&batch, self.now_ms);
        match &mut self.sites[index].executor {
            Some(executor) if executor.deaf => self.lose_frame(index),
            Some(executor) => executor.send(batch, masks, at_ms),
            None => {}
        }
        Ok(())
    }

    /// What a batch's masked rows may sample, as far as their owners know their outputs. I21: rows are masked
    /// where they must be, and never before the token in front of them is known.
    fn masks(&mut self, batch: &Batch) -> Result<Vec<MaskRow>, Broken> {
        let mut masks = Vec::new();
        for (index, row) in (0..).zip(&batch.rows) {
            let (id, client) = (row.request.0, &self.clients[row.request.0 as usize - 1]);
            let prompt_len = client.submit.tokens.len();
            let outputs = (row.start + row.len).saturating_sub(prompt_len as u32);
            let limited =
                masked(&client.submit).filter(|_| row.samples).unwrap_or(u32::MAX..u32::MAX);
            // Behind their end, masks that allow every id go on until the scheduler has heard of it.
            let right =
                if row.masked { outputs >= limited.start } else { !limited.contains(&outputs) };
            ensure!(
                "I21",
                right,
                "request {id}: masked {} at {outputs} of {limited:?}",
                row.masked
            );
            if !row.masked {
                continue;
            }
            let seen = !matches!(row.input, Input::SampledAt { .. }) && row.drafts == 0;
            let known = client.text.len() as u32;
            ensure!("I21", seen, "request {id} is masked behind a token that nobody knows");
            ensure!("I21", row.start + row.len == known, "request {id} is masked out of place");
            let vocab = self.setup.engine.limits.vocab_size;
            let mut grammar = Grammar::new(client.submit.key, vocab);
            client.text[prompt_len..].iter().for_each(|&token| grammar.hear(token));
            let all = || vec![u32::MAX; vocab.div_ceil(32) as usize];
            let allowed = if limited.contains(&outputs) { grammar.mask() } else { all() };
            masks.push(MaskRow { row: index, allowed, late: false });
        }
        for mask in &mut masks {
            if self.is_late(batch.rows[mask.row as usize].request) {
                (mask.allowed, mask.late) = (Vec::new(), true);
            }
        }
        Ok(masks)
    }

    /// I22: what is told of a block that was evicted is possible.
    fn evicted(&mut self, replica: Replica, stays: &[Stay]) -> Checked {
        for stay in stays {
            let Stay { lifetime_ms, idle_ms, gaps_ms } = stay;
            let within = idle_ms + gaps_ms.iter().sum::<u64>();
            ensure!("I22", within <= *lifetime_ms && gaps_ms.len() <= 3, "{stay:?}");
            ensure!("I22", *lifetime_ms <= self.now_ms, "{stay:?} at {}", self.now_ms);
        }
        self.sites[usize::from(replica.0)].stays += stays.len() as u64;
        self.trace.note(self.now_ms, "evicted", &[u64::from(replica.0), stays.len() as u64]);
        Ok(())
    }

    /// I22: a stay is told of every eviction if all blocks are measured, of none if none is.
    fn check_stays(&self) -> Checked {
        let share = self.setup.engine.kv.residency;
        for (replica, site) in self.sites.iter().enumerate() {
            let (stays, removed) = (site.stays, site.mirror.removed);
            let right = match share {
                None => stays == 0,
                all if all == Share::new(1.0) => stays == removed,
                Some(_) => stays <= removed,
            };
            ensure!(
                "I22",
                right,
                "replica {replica}: {stays} stays, {removed} evicted of {share:?}"
            );
        }
        Ok(())
    }

    /// I1 and I8 by the engine's own counters.
    fn count(&mut self, stats: StepStats) -> Checked {
        let (blocks, limits) = (stats.blocks, &self.setup.engine.limits);
        let sum = blocks.vacant + blocks.cached + blocks.in_use;
        ensure!("I1", sum == blocks.pool, "{blocks:?}");
        ensure!("I1", blocks.reserved <= blocks.vacant + blocks.cached, "{blocks:?}");
        let (running, seats) = (stats.running, limits.requests_running);
        ensure!("I8", running <= seats, "{running} requests on {seats} seats");
        let site = &mut self.sites[usize::from(stats.replica.0)];
        let before = &site.stats;
        let grows = stats.steps_total >= before.steps_total
            && stats.preemptions_total >= before.preemptions_total
            && stats.generated_tokens_total >= before.generated_tokens_total
            && stats.outputs_dropped_total >= before.outputs_dropped_total;
        ensure!("I10", grows, "totals shrink: {before:?}, then {stats:?}");
        let drafts = &stats.drafts_total;
        let accepted: u64 = drafts.accepted.iter().sum();
        // A draft stands only where all before it do.
        let falling = drafts.accepted.is_sorted_by(|a, b| a >= b);
        let most = drafts.rows * u64::from(limits.drafts);
        let right = falling && accepted <= drafts.tokens && drafts.tokens <= most;
        ensure!("I10", right, "{drafts:?} with up to {} drafts a row", limits.drafts);
        site.stats = stats;
        Ok(())
    }
}
