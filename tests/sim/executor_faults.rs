//! Steps and faults of the simulated executors. The faults are failed rows, invalid or stale outputs,
//! crashes, and hangs.

use crate::event_queue::{InFlightStepOutput, SimEvent};
use crate::executor::{CompletedStep, SimExecutor};
use crate::executor_watch::ExecutorLivenessEvent;
use crate::hash_model::text::avalanche;
use crate::invariant::{CheckResult, InvariantViolation};
use crate::kv_memory::blocks_in;
use crate::world::{SimReplica, SimWorld, replica_changes};
use protocol::{BatchRow, Replica, RowError, RowOutput, Token};
use scheduler::SchedulerEvent;

impl SimWorld {
    /// Finishes the step that is due on a replica, unless the executors hang. After the step, the executors
    /// hang or crash, or their link breaks, with probabilities that are part of the configuration.
    pub(crate) fn step_done(&mut self, replica: usize) -> CheckResult {
        let hangs = |replica_state: &SimReplica| {
            replica_state.executor.as_ref().is_some_and(|it| it.hang.is_some())
        };
        if hangs(&self.replicas[replica]) {
            return Ok(());
        }
        if self.waits_for_peers(replica) {
            let incarnation = self.replicas[replica].incarnation;
            // A rank that hangs delays the other ranks for a long time, so the other ranks check less often
            // whether they can continue.
            let soon_ms = if self.replicas.iter().any(hangs) { 200 } else { 8 };
            let later_ms = self.now_ms + 1 + self.rng.below(soon_ms);
            self.events.add(later_ms, SimEvent::StepDone { replica, incarnation });
            return Ok(());
        }
        let faults = self.config.faults.clone();
        let Some(ran) = self.execute(replica, faults.failed_row)? else {
            self.start_next_step(replica);
            return Ok(());
        };
        let delay_ms = self.link_delay_ms();
        let Some(executor) = &mut self.replicas[replica].executor else { return Ok(()) };
        executor.last_message_ms = self.now_ms;
        executor.last_reply_ms = executor.last_reply_ms.max(self.now_ms + delay_ms);
        let (at_ms, link) = (executor.last_reply_ms, self.replicas[replica].incarnation);
        if self.rng.chance_per_mille(faults.duplicate_reply) {
            let output = ran.output.clone();
            let later_ms = at_ms + self.rng.below(200);
            let reply = InFlightStepOutput {
                output,
                filled_blocks: Vec::new(),
                repeated: true,
                incarnation: link,
            };
            self.events.add(later_ms + 1, SimEvent::Reply { replica, reply });
        }
        let reply = InFlightStepOutput {
            output: ran.output,
            filled_blocks: ran.filled_blocks,
            repeated: false,
            incarnation: link,
        };
        self.events.add(at_ms, SimEvent::Reply { replica, reply });
        if self.crashes_left > 0 && self.rng.chance_per_mille(faults.hang) {
            self.hang_executors(replica);
            return Ok(());
        }
        if self.crashes_left > 0 && self.rng.chance_per_mille(faults.crash) {
            return self.crash(replica);
        }
        if self.crashes_left > 0 && self.rng.chance_per_mille(faults.broken_link) {
            return self.break_link(replica);
        }
        self.start_next_step(replica);
        Ok(())
    }

    /// Whether the step of this rank waits because another rank of the group has not started the same step.
    fn waits_for_peers(&self, replica: usize) -> bool {
        let step = |executor: &SimExecutor| executor.newest_begun_step(self.now_ms);
        let own = self.replicas[replica].executor.as_ref().map(step);
        let steps = self
            .replicas
            .iter()
            .filter_map(|replica_state| replica_state.executor.as_ref().map(step));
        self.config.coupled_steps && steps.min() < own
    }

    /// Runs the first batch in a replica's queue; each row fails with probability `rate` / 1000.
    pub(crate) fn execute(
        &mut self,
        replica: usize,
        rate: u32,
    ) -> Result<Option<CompletedStep>, InvariantViolation> {
        let bits = if rate > 0 { self.rng.next_u64() } else { 0 };
        let draw = move |row: &BatchRow| avalanche(bits ^ row.request.0) % 1000;
        let fails = move |row: &BatchRow| {
            (draw(row) < u64::from(rate)).then_some(RowError::NonFiniteLogits)
        };
        let Some(executor) = &mut self.replicas[replica].executor else { return Ok(None) };
        let ran = executor
            .run(fails)
            .map_err(|violation| InvariantViolation { invariant: "I7", text: violation.0 })?;
        let Some(mut ran) = ran else { return Ok(None) };
        self.counts.shifted_rows += ran.shifted_rows;
        for (index, row) in ran.rows.iter().enumerate() {
            let client = &mut self.clients[row.request.0 as usize - 1];
            let output = &mut ran.output.rows[index];
            self.counts.drafted += u64::from(output.drafted);
            self.counts.accepted += u64::from(output.accepted);
            if row.masked {
                self.counts.masked_drafted += u64::from(output.drafted);
                self.counts.masked_accepted += u64::from(output.accepted);
            }
            let garbled = rate > 0 && draw(row) >= 1000 - u64::from(rate);
            if garbled && output.error.is_none() {
                client.allowed.bad_output = true;
                corrupt_output(row, output, bits, self.config.scheduler.limits.vocab_size);
                ran.filled_blocks.retain(|(row, _)| *row != index);
            }
            let failed = output.error.is_some_and(|error| error != RowError::MaskOverdue);
            client.allowed.row_failed |= failed;
            if garbled || failed {
                self.counts.failed_rows += 1;
                self.trace.record(self.now_ms, "row fails", &[row.request.0, u64::from(row.start)]);
            }
        }
        Ok(Some(ran))
    }

    /// Starts the next step of a replica if its executors are idle and a batch is queued.
    pub(crate) fn start_next_step(&mut self, replica: usize) {
        let (step_ms, stall) = (self.config.load.step_ms, self.config.faults.slow_step);
        let now_ms = self.now_ms;
        let replica_state = &mut self.replicas[replica];
        let Some(executor) = &mut replica_state.executor else { return };
        if executor.hang.is_some() {
            return;
        }
        let Some(start_ms) = executor.next_start_ms(now_ms) else { return };
        executor.busy = true;
        executor.begins_ms = start_ms;
        let mut end_ms = start_ms + self.rng.below(u64::from(step_ms) + 1);
        if self.rng.chance_per_mille(stall) {
            end_ms += self.rng.below(3000);
        }
        let incarnation = replica_state.incarnation;
        self.events.add(end_ms, SimEvent::StepDone { replica, incarnation });
    }

    /// Makes the executors of a replica crash; in lockstep, the executors of all ranks crash.
    pub(crate) fn crash(&mut self, replica: usize) -> CheckResult {
        self.crashes_left = self.crashes_left.saturating_sub(1);
        self.counts.crashes += 1;
        let seen_ms = self.now_ms + self.rng.below(50);
        let restored_ms = seen_ms + 1 + self.rng.below(700);
        self.trace.record(self.now_ms, "crash", &[replica as u64]);
        let incarnation = self.replicas[replica].incarnation + 1;
        self.events.add(seen_ms, SimEvent::ExecutorsFailed { replica, incarnation });
        if self.rng.chance_per_mille(200) {
            // A second failure report for the same crash, as if two ranks of the replica reported it.
            let again_ms = seen_ms + self.rng.below(2);
            self.events.add(again_ms, SimEvent::ExecutorsFailed { replica, incarnation });
        }
        self.replace_executors(replica, seen_ms, restored_ms)
    }

    /// Removes the executors of a replica or, in lockstep, the executors of all ranks. The failure reaches
    /// the scheduler at `seen_ms`, and replacement executors may be ready from `restored_ms` on.
    pub(crate) fn replace_executors(
        &mut self,
        replica: usize,
        seen_ms: u64,
        restored_ms: u64,
    ) -> CheckResult {
        for replica in self.group_of(&[replica]) {
            let offset_ms = self.rng.below(30);
            let link = self.replicas[replica].incarnation;
            let incarnation = link + 1;
            self.replicas[replica].incarnation = incarnation;
            self.events
                .add(restored_ms + offset_ms, SimEvent::ExecutorsReady { replica, incarnation });
            self.queue_stale_replies(replica, link)?;
            self.replicas[replica].executor = None;
        }
        if self.config.scheduler.limits.failure_timeout_ms < 1000 {
            for after_ms in (0..2000).step_by(50) {
                self.events.add(seen_ms + after_ms, SimEvent::Wake);
            }
        }
        Ok(())
    }

    /// Marks the new executors of a replica as ready. While other ranks of the group are not ready, one of
    /// the restored ranks may fail again.
    pub(crate) fn executors_ready(&mut self, replica: usize) {
        if let Some(at_ms) = self.replacement_ready_ms(replica) {
            let incarnation = self.replicas[replica].incarnation;
            self.events.add(at_ms, SimEvent::ExecutorsReady { replica, incarnation });
            return;
        }
        self.trace.record(self.now_ms, "ready", &[replica as u64]);
        let fitting = self.draw_restored_pool_size();
        let bytes = self.config.kv_memory.pool_bytes(fitting);
        let blocks = blocks_in(&self.config.scheduler.kv.spec, bytes);
        self.replicas[replica].set_kv_memory(blocks, bytes);
        self.replicas[replica].announced_incarnation = self.replicas[replica].incarnation;
        if self.rng.chance_per_mille(self.config.faults.fail_again) {
            let incarnation = self.replicas[replica].incarnation;
            let at_ms = self.now_ms + 1 + self.rng.below(10);
            self.events.add(at_ms, SimEvent::FailAgain { replica, incarnation });
        }
        let graph_rows = self.config.scheduler.capture_sizes.clone();
        let replica = Replica(replica as u16);
        self.inbox.push(SchedulerEvent::ExecutorsReady {
            replica,
            blocks,
            capture_sizes: graph_rows,
        });
    }

    /// Makes a restored executor fail again, unless all ranks of its group are restored or the phase with
    /// faults has ended.
    pub(crate) fn fail_again(&mut self, replica: usize, incarnation: u32) -> CheckResult {
        let same = self.replicas[replica].incarnation == incarnation;
        let complete = self.replicas.iter().all(|replica_state| replica_state.executor.is_some());
        if !same || complete || self.crashes_left == 0 || self.config.faults.fail_again == 0 {
            return Ok(());
        }
        self.counts.repeated_failures += 1;
        self.crash(replica)
    }

    /// Runs the steps that a crashed executor had queued. Some of their outputs still arrive, at any later
    /// time.
    pub(crate) fn queue_stale_replies(&mut self, replica: usize, link: u32) -> CheckResult {
        let rate = self.config.faults.stale_reply;
        let can_reply = |executor: &SimExecutor| executor.has_work() && executor.hang.is_none();
        while self.replicas[replica].executor.as_ref().is_some_and(can_reply) {
            let ran = self.execute(replica, 0)?;
            let Some(CompletedStep { output, .. }) =
                ran.filter(|_| self.rng.chance_per_mille(rate))
            else {
                continue;
            };
            // The output arrives after the report of the crash. If it arrived earlier, it would be an
            // ordinary output.
            let at_ms = self.now_ms + 51 + self.rng.below(1500);
            let reply = InFlightStepOutput {
                output,
                filled_blocks: Vec::new(),
                repeated: false,
                incarnation: link,
            };
            self.events.add(at_ms, SimEvent::Reply { replica, reply });
        }
        Ok(())
    }

    /// Delivers a step output to the scheduler.
    pub(crate) fn reply(&mut self, replica: usize, reply: InFlightStepOutput) {
        if self.is_link_broken(replica, reply.incarnation) {
            self.count_lost_frame(replica);
            return;
        }
        if !reply.repeated {
            self.message_arrives(replica, reply.incarnation);
        }
        self.signals
            .push(ExecutorLivenessEvent::StepOutputArrived { replica, step: reply.output.step });
        let failed = replica_changes(&self.inbox, self.config.scheduler.lockstep).failed;
        let fails_now = self.group_of(&failed).contains(&replica);
        let replica_state = &mut self.replicas[replica];
        let epoch = self.scheduler.epoch(Replica(replica as u16));
        let stale = reply.repeated || fails_now || reply.output.epoch != epoch;
        if stale {
            replica_state.stale_outputs += 1;
            self.counts.stale_outputs += 1;
        } else {
            replica_state.batch_checker.in_flight =
                replica_state.batch_checker.in_flight.saturating_sub(1);
            reply
                .filled_blocks
                .iter()
                .for_each(|&(_, context)| replica_state.mirror.mark_computed(context));
        }
        let numbers = [replica as u64, reply.output.step.0, reply.output.epoch.0, u64::from(stale)];
        self.trace.record(self.now_ms, "output", &numbers);
        let replica = Replica(replica as u16);
        self.inbox.push(SchedulerEvent::StepOutput { replica, output: reply.output });
    }

    /// Draws the KV pool size of new executors, which may have less free memory than the failed executors.
    /// Requests that no longer fit in the pool may fail.
    pub(crate) fn draw_restored_pool_size(&mut self) -> u32 {
        let blocks = self.config.scheduler.kv.blocks;
        if !self.rng.chance_per_mille(self.config.faults.smaller_pool) {
            return blocks;
        }
        let blocks = self.rng.between(1, blocks);
        for client in &mut self.clients {
            let needed = self.config.blocks_of_request(client.limit());
            client.allowed.unavailable |= needed > blocks;
        }
        blocks
    }

    /// Draws the one-way delay of a message on a link.
    pub(crate) fn link_delay_ms(&mut self) -> u64 {
        self.rng.below(u64::from(self.config.load.link_ms) + 1)
    }
}

/// Makes a row's output invalid: a token id outside the vocabulary, one token too many, or more accepted
/// draft tokens than the row had draft tokens.
fn corrupt_output(row: &BatchRow, output: &mut RowOutput, bits: u64, vocab_size: Token) {
    match (bits % 3, output.sampled_tokens.first_mut()) {
        (0, Some(first)) => *first = vocab_size,
        (1, Some(_)) => {
            let extra = row.drafts + 1 - output.accepted;
            output.accepted += extra;
            output.sampled_tokens.extend((0..extra).map(|_| 0));
        }
        _ => output.sampled_tokens.push(0),
    }
}
