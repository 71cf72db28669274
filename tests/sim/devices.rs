//! The simulated executors of a world and what befalls them: steps, replies, failures, deaths.

use crate::broken::{Broken, Checked};
use crate::executor::{Executor, Ran};
use crate::happening::{Happening, Reply};
use crate::hash_model::text::avalanche;
use crate::vigil::Sign;
use crate::world::{Site, World, news};
use protocol::{Replica, Row, RowError, RowOutput, Token};
use scheduler::Event;

impl World {
    /// The executor runs the step that was due, and with bad luck never runs another one.
    pub(crate) fn step_done(&mut self, replica: usize) -> Checked {
        let hangs = |site: &Site| site.executor.as_ref().is_some_and(|it| it.hangs.is_some());
        if hangs(&self.sites[replica]) {
            return Ok(());
        }
        if self.waits_for_others(replica) {
            let incarnation = self.sites[replica].incarnation;
            // Whoever hangs keeps the others waiting for long.
            let soon_ms = if self.sites.iter().any(hangs) { 200 } else { 8 };
            let later_ms = self.now_ms + 1 + self.chance.below(soon_ms);
            self.agenda.add(later_ms, Happening::StepDone { replica, incarnation });
            return Ok(());
        }
        let faults = self.setup.faults.clone();
        let Some(ran) = self.execute(replica, faults.row)? else {
            self.kick(replica);
            return Ok(());
        };
        let delay_ms = self.link_delay_ms();
        let Some(executor) = &mut self.sites[replica].executor else { return Ok(()) };
        executor.said_ms = self.now_ms;
        executor.last_reply_ms = executor.last_reply_ms.max(self.now_ms + delay_ms);
        let (at_ms, link) = (executor.last_reply_ms, self.sites[replica].incarnation);
        if self.chance.hits(faults.duplicate) {
            let output = ran.output.clone();
            let later_ms = at_ms + self.chance.below(200);
            let reply = Reply { output, filled: Vec::new(), repeated: true, link };
            self.agenda.add(later_ms + 1, Happening::Reply { replica, reply });
        }
        let reply = Reply { output: ran.output, filled: ran.filled, repeated: false, link };
        self.agenda.add(at_ms, Happening::Reply { replica, reply });
        if self.crashes_left > 0 && self.chance.hits(faults.hang) {
            self.hang(replica);
            return Ok(());
        }
        if self.crashes_left > 0 && self.chance.hits(faults.crash) {
            return self.crash(replica);
        }
        if self.crashes_left > 0 && self.chance.hits(faults.cut) {
            return self.cut(replica);
        }
        self.kick(replica);
        Ok(())
    }

    /// Whether another rank of the group has not begun the step that this one is in.
    fn waits_for_others(&self, replica: usize) -> bool {
        let step = |executor: &Executor| executor.begun(self.now_ms);
        let own = self.sites[replica].executor.as_ref().map(step);
        let others = self.sites.iter().filter_map(|site| site.executor.as_ref().map(step));
        self.setup.coupled && others.min() < own
    }

    /// Runs the batch at the head of a replica's queue; some rows may fail.
    pub(crate) fn execute(&mut self, replica: usize, rate: u32) -> Result<Option<Ran>, Broken> {
        let luck = if rate > 0 { self.chance.bits() } else { 0 };
        let draw = move |row: &Row| avalanche(luck ^ row.request.0) % 1000;
        let fails =
            move |row: &Row| (draw(row) < u64::from(rate)).then_some(RowError::NonFiniteLogits);
        let Some(executor) = &mut self.sites[replica].executor else { return Ok(None) };
        let ran = executor
            .run(fails)
            .map_err(|violation| Broken { invariant: "I7", text: violation.0 })?;
        let Some(mut ran) = ran else { return Ok(None) };
        self.tally.moved += ran.moved;
        for (index, row) in ran.rows.iter().enumerate() {
            let client = &mut self.clients[row.request.0 as usize - 1];
            let output = &mut ran.output.rows[index];
            self.tally.drafted += u64::from(output.drafted);
            self.tally.accepted += u64::from(output.accepted);
            let garbled = rate > 0 && draw(row) >= 1000 - u64::from(rate);
            if garbled && output.error.is_none() {
                client.excuses.bad_output = true;
                garble(row, output, luck, self.setup.engine.limits.vocab_size);
                ran.filled.retain(|(row, _)| *row != index);
            }
            let failed = output.error.is_some_and(|error| error != RowError::MaskLate);
            client.excuses.row_failed |= failed;
            if garbled || failed {
                self.tally.failed_rows += 1;
                self.trace.note(self.now_ms, "row fails", &[row.request.0, u64::from(row.start)]);
            }
        }
        Ok(Some(ran))
    }

    /// Starts the next step of a replica, if its executors are idle and one waits.
    pub(crate) fn kick(&mut self, replica: usize) {
        let (step_ms, stall) = (self.setup.load.step_ms, self.setup.faults.stall);
        let now_ms = self.now_ms;
        let site = &mut self.sites[replica];
        let Some(executor) = &mut site.executor else { return };
        if executor.hangs.is_some() {
            return;
        }
        let Some(start_ms) = executor.next_start_ms(now_ms) else { return };
        executor.busy = true;
        executor.begins_ms = start_ms;
        let mut end_ms = start_ms + self.chance.below(u64::from(step_ms) + 1);
        if self.chance.hits(stall) {
            end_ms += self.chance.below(3000);
        }
        let incarnation = site.incarnation;
        self.agenda.add(end_ms, Happening::StepDone { replica, incarnation });
    }

    /// A replica's executors die, in lockstep those of all ranks.
    pub(crate) fn crash(&mut self, replica: usize) -> Checked {
        self.crashes_left = self.crashes_left.saturating_sub(1);
        self.tally.crashes += 1;
        let seen_ms = self.now_ms + self.chance.below(50);
        let back_ms = seen_ms + 1 + self.chance.below(700);
        self.trace.note(self.now_ms, "crash", &[replica as u64]);
        let incarnation = self.sites[replica].incarnation + 1;
        self.agenda.add(seen_ms, Happening::Lost { replica, incarnation });
        if self.chance.hits(200) {
            // Two ranks of the replica report it.
            let again_ms = seen_ms + self.chance.below(2);
            self.agenda.add(again_ms, Happening::Lost { replica, incarnation });
        }
        self.replace(replica, seen_ms, back_ms)
    }

    /// A replica's executors are gone, in lockstep those of all ranks; the engine hears of it at `seen_ms`, and others are there
    /// from `back_ms` on.
    pub(crate) fn replace(&mut self, replica: usize, seen_ms: u64, back_ms: u64) -> Checked {
        for replica in self.group_of(&[replica]) {
            let late_ms = self.chance.below(30);
            let link = self.sites[replica].incarnation;
            let incarnation = link + 1;
            self.sites[replica].incarnation = incarnation;
            self.agenda.add(back_ms + late_ms, Happening::Ready { replica, incarnation });
            self.leave_replies_behind(replica, link)?;
            self.sites[replica].executor = None;
        }
        if self.setup.engine.limits.loss_timeout_ms < 1000 {
            for after_ms in (0..2000).step_by(50) {
                self.agenda.add(seen_ms + after_ms, Happening::Wake);
            }
        }
        Ok(())
    }

    /// New executors of a replica are there; while others of the group are not, one of them may die again.
    pub(crate) fn ready(&mut self, replica: usize) {
        if let Some(at_ms) = self.replaced_ms(replica) {
            let incarnation = self.sites[replica].incarnation;
            self.agenda.add(at_ms, Happening::Ready { replica, incarnation });
            return;
        }
        self.trace.note(self.now_ms, "ready", &[replica as u64]);
        let blocks = self.blocks_of_new_executors();
        self.sites[replica].blocks = blocks;
        self.sites[replica].announced = self.sites[replica].incarnation;
        if self.chance.hits(self.setup.faults.relapse) {
            let incarnation = self.sites[replica].incarnation;
            let at_ms = self.now_ms + 1 + self.chance.below(10);
            self.agenda.add(at_ms, Happening::Relapse { replica, incarnation });
        }
        let graph_rows = self.setup.engine.graph_rows.clone();
        let replica = Replica(replica as u16);
        self.inbox.push(Event::Ready { replica, blocks, graph_rows });
    }

    /// An executor that came back dies, unless its group is complete by now or all is healed.
    pub(crate) fn relapse(&mut self, replica: usize, incarnation: u32) -> Checked {
        let same = self.sites[replica].incarnation == incarnation;
        let complete = self.sites.iter().all(|site| site.executor.is_some());
        if !same || complete || self.crashes_left == 0 || self.setup.faults.relapse == 0 {
            return Ok(());
        }
        self.tally.relapses += 1;
        self.crash(replica)
    }

    /// Replies to what a dying executor had in its queue may still arrive, whenever they like.
    pub(crate) fn leave_replies_behind(&mut self, replica: usize, link: u32) -> Checked {
        let rate = self.setup.faults.stale;
        let answers = |executor: &Executor| executor.has_work() && executor.hangs.is_none();
        while self.sites[replica].executor.as_ref().is_some_and(answers) {
            let ran = self.execute(replica, 0)?;
            let Some(Ran { output, .. }) = ran.filter(|_| self.chance.hits(rate)) else { continue };
            // Behind the news of the death: before it, it would be an ordinary reply.
            let at_ms = self.now_ms + 51 + self.chance.below(1500);
            let reply = Reply { output, filled: Vec::new(), repeated: false, link };
            self.agenda.add(at_ms, Happening::Reply { replica, reply });
        }
        Ok(())
    }

    /// An output reaches the engine.
    pub(crate) fn reply(&mut self, replica: usize, reply: Reply) {
        if self.is_severed(replica, reply.link) {
            self.lose_frame(replica);
            return;
        }
        if !reply.repeated {
            self.arrives(replica, reply.link);
        }
        self.signs.push(Sign::Answered { replica, step: reply.output.step });
        let lost = news(&self.inbox, self.setup.engine.lockstep).lost;
        let lost_now = self.group_of(&lost).contains(&replica);
        let site = &mut self.sites[replica];
        let epoch = self.engine.epoch(Replica(replica as u16));
        let stale = reply.repeated || lost_now || reply.output.epoch != epoch;
        if stale {
            site.stale_outputs += 1;
            self.tally.stale += 1;
        } else {
            site.told.in_flight = site.told.in_flight.saturating_sub(1);
            reply.filled.iter().for_each(|&(_, context)| site.mirror.computed(context));
        }
        let numbers = [replica as u64, reply.output.step.0, reply.output.epoch.0, u64::from(stale)];
        self.trace.note(self.now_ms, "output", &numbers);
        let replica = Replica(replica as u16);
        self.inbox.push(Event::Output { replica, output: reply.output });
    }

    /// New executors may find less memory than the old ones: what no longer fits may fail.
    pub(crate) fn blocks_of_new_executors(&mut self) -> u32 {
        let blocks = self.setup.engine.kv.blocks;
        if !self.chance.hits(self.setup.faults.shrink) {
            return blocks;
        }
        let blocks = self.chance.between(1, blocks);
        let size = self.setup.block_tokens();
        for client in &mut self.clients {
            client.excuses.unavailable |= client.limit().div_ceil(size) > blocks;
        }
        blocks
    }

    /// A one-way delay of a link.
    pub(crate) fn link_delay_ms(&mut self) -> u64 {
        self.chance.below(u64::from(self.setup.load.link_ms) + 1)
    }
}

/// Makes a result impossible: an id that does not exist, an id too many, or more drafts accepted
/// than there were.
fn garble(row: &Row, output: &mut RowOutput, luck: u64, vocab_size: Token) {
    match (luck % 3, output.emitted.first_mut()) {
        (0, Some(first)) => *first = vocab_size,
        (1, Some(_)) => {
            let made_up = row.drafts + 1 - output.accepted;
            output.accepted += made_up;
            output.emitted.extend((0..made_up).map(|_| 0));
        }
        _ => output.emitted.push(0),
    }
}
