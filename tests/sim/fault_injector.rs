//! Faults that are injected at the interfaces of the scheduler without changes to its code. A fault alters
//! the events that the scheduler receives, the effects that the scheduler returns, or the use of monitoring
//! rules that the simulator shares with the server. Faults inside the scheduler and the KV cache are patches
//! in `tests/sim/mutants`.

use crate::hash_model::StateReplayTokens;
use protocol::{
    Batch, BatchRow, Epoch, KvEvent, Replica, RequestId, RowInput, StateSlot, StepId, StepOutput,
};
use scheduler::{RequestSubmission, Scheduler, SchedulerEffect, SchedulerEvent};
use std::collections::{BTreeMap, VecDeque};

/// A fault that the simulator must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InjectedFault {
    /// An abort is dropped if no row of its request has been sent to an executor.
    AbortDropped,
    /// The length limit of a request is too long by one token.
    LengthLimitOffByOne,
    /// The cache salt is not part of the block keys.
    SaltIgnored,
    /// An output that arrives a second time is applied as the output of the next step in flight.
    RepeatedOutputApplied,
    /// After a preemption, the block table of a request is not sent again.
    BlockTableNotResent,
    /// After a deduplication, the new block id is not sent: the executor's block table keeps the freed block.
    DeduplicationNotSent,
    /// A row is sent without the number of draft tokens in flight (`draft_slack`), which the executor needs
    /// to compute the row's position.
    DraftSlackNotSent,
    /// With two rows of a request in flight, the next row reads the token that the older of the two rows
    /// sampled.
    StaleSequenceSlotRead,
    /// A recomputed request samples at the end of its prompt instead of at the last known token.
    SampleAtPromptEnd,
    /// A block is evicted without a KV event.
    EvictionWithoutEvent,
    /// Executors are declared failed at the first heartbeat timeout, without a grace period.
    PauseCountsAsHeartbeatTimeout,
    /// A pause of the process counts as running time of the step in flight.
    PauseCountsAsStepTime,
    /// Heartbeats that were queued during a pause count as heartbeats at different times.
    QueuedHeartbeatsCountTwice,
    /// A client id that is a number is used as the internal request id.
    ClientIdUsedAsRequestId,
    /// An abort by client id ends only one of the requests that share it.
    AbortByClientIdMissesDuplicate,
    /// The block tables of window groups begin one entry too late.
    WindowTableOffByOne,
    /// The block table changes of the first window group are sent for the last group.
    WindowTablesMixedUp,
    /// The block tables of window groups are sent with the first row of a request only.
    WindowGrowthNotSent,
    /// After a preemption, the block tables of window groups are not sent again.
    WindowTableNotResent,
    /// A block of a window group is evicted without a KV event.
    WindowEvictionWithoutEvent,
    /// A row reads the state of the row before it in the batch.
    StateOfOtherRow,
    /// A request resumes without a checkpoint: its first row reads the slot that it writes.
    StateNotRestored,
    /// A row that makes a checkpoint overwrites it: it writes the slot that it reads.
    StateForkOverwritesCheckpoint,
    /// The row after a checkpoint reads the checkpoint again instead of the state after it.
    StaleStateRestored,
    /// A decode row writes the state slot next to its own.
    StateWrittenToOtherSlot,
    /// After verification, the device applies rejected draft tokens to the state as well.
    StateReplayOfRejectedDrafts,
    /// After verification, the device applies no accepted draft token to the state.
    StateReplayWithoutDrafts,
    /// In a lockstep group, a rank without rows gets no batch.
    IdleRankGetsNoBatch,
    /// Each rank of a lockstep group pads its MoE layers to its own number of tokens.
    RankPadsIndependently,
}

impl InjectedFault {
    /// Faults that simulations without lockstep groups can detect.
    pub(crate) const REPLICA_FAULTS: [Self; 15] = [
        Self::AbortDropped,
        Self::LengthLimitOffByOne,
        Self::SaltIgnored,
        Self::RepeatedOutputApplied,
        Self::BlockTableNotResent,
        Self::DeduplicationNotSent,
        Self::DraftSlackNotSent,
        Self::StaleSequenceSlotRead,
        Self::SampleAtPromptEnd,
        Self::EvictionWithoutEvent,
        Self::PauseCountsAsHeartbeatTimeout,
        Self::PauseCountsAsStepTime,
        Self::QueuedHeartbeatsCountTwice,
        Self::ClientIdUsedAsRequestId,
        Self::AbortByClientIdMissesDuplicate,
    ];

    /// Faults that only simulations of models with window groups can detect.
    pub(crate) const WINDOW_FAULTS: [Self; 5] = [
        Self::WindowTableOffByOne,
        Self::WindowTablesMixedUp,
        Self::WindowGrowthNotSent,
        Self::WindowTableNotResent,
        Self::WindowEvictionWithoutEvent,
    ];

    /// Faults that only simulations of models with state groups can detect.
    pub(crate) const STATE_FAULTS: [Self; 7] = [
        Self::StateOfOtherRow,
        Self::StateNotRestored,
        Self::StateForkOverwritesCheckpoint,
        Self::StaleStateRestored,
        Self::StateWrittenToOtherSlot,
        Self::StateReplayOfRejectedDrafts,
        Self::StateReplayWithoutDrafts,
    ];

    /// Faults that only simulations with a lockstep group can detect.
    pub(crate) const GROUP_FAULTS: [Self; 2] =
        [Self::IdleRankGetsNoBatch, Self::RankPadsIndependently];
}

/// State of a request's sequence slot, derived from the rows that have been sent.
#[derive(Debug, Clone, Copy, Default)]
struct SentSlotState {
    /// Number of block table entries that have been sent.
    table_entries: u32,
    prompt_len: u32,
    /// Last step in which the request sampled a token from a row that contained its input token. Other rows
    /// read their input token from the sequence slot.
    host_fed_step: StepId,
    /// State slot that the last row read, if it wrote another one.
    fork_source: Option<StateSlot>,
}

/// A step that was sent and has no output yet.
#[derive(Debug, Clone, Copy)]
struct SentStep {
    step: StepId,
    epoch: Epoch,
    rows: usize,
}

/// Alters the inputs and outputs of a scheduler according to one fault.
#[derive(Debug, Default)]
pub(crate) struct FaultInjector {
    fault: Option<InjectedFault>,
    sequences: BTreeMap<RequestId, SentSlotState>,
    steps_in_flight: BTreeMap<Replica, VecDeque<SentStep>>,
}

impl FaultInjector {
    /// Creates an injector of `fault`; `None` = no fault.
    pub(crate) fn new(fault: Option<InjectedFault>) -> Self {
        Self { fault, ..Self::default() }
    }

    /// Whether `fault` is injected.
    pub(crate) fn injects(&self, fault: InjectedFault) -> bool {
        self.fault == Some(fault)
    }

    /// Tokens of rows with draft tokens that the simulated device applies to their states.
    pub(crate) fn replay_tokens(&self) -> StateReplayTokens {
        match self.fault {
            Some(InjectedFault::StateReplayOfRejectedDrafts) => StateReplayTokens::AllDrafts,
            Some(InjectedFault::StateReplayWithoutDrafts) => StateReplayTokens::InputOnly,
            _ => StateReplayTokens::Accepted,
        }
    }

    /// Alters the events of a tick before the scheduler receives them.
    pub(crate) fn alter_inbox(&mut self, inbox: &mut Vec<SchedulerEvent>, scheduler: &Scheduler) {
        if self.injects(InjectedFault::AbortDropped) {
            inbox.retain(|event| self.keeps_abort(event));
        }
        for event in inbox {
            self.alter_event(event, scheduler);
        }
    }

    fn alter_event(&mut self, event: &mut SchedulerEvent, scheduler: &Scheduler) {
        match (self.fault, event) {
            (Some(InjectedFault::LengthLimitOffByOne), SchedulerEvent::Submit(submit)) => {
                lengthen_limit(submit, scheduler);
            }
            (Some(InjectedFault::SaltIgnored), SchedulerEvent::Submit(submit)) => {
                remove_salt(submit);
            }
            (
                Some(InjectedFault::RepeatedOutputApplied),
                SchedulerEvent::StepOutput { replica, output },
            ) => self.relabel_repeated_output(*replica, output, scheduler),
            _ => {}
        }
    }

    /// Alters the effects of a tick before they are applied.
    pub(crate) fn alter_effects(&mut self, effects: &mut Vec<SchedulerEffect>) {
        if self.injects(InjectedFault::IdleRankGetsNoBatch) {
            effects.retain(|effect| !is_empty_batch(effect));
        }
        if self.fault.is_none() {
            return;
        }
        for effect in effects {
            match effect {
                SchedulerEffect::SendBatch { replica, batch } => self.alter_batch(*replica, batch),
                SchedulerEffect::KvEvents { events, .. }
                    if self.injects(InjectedFault::EvictionWithoutEvent) =>
                {
                    events.retain(|event| !matches!(event, KvEvent::Removed { .. }));
                }
                SchedulerEffect::KvEvents { events, .. }
                    if self.injects(InjectedFault::WindowEvictionWithoutEvent) =>
                {
                    let is_hidden = |group: u8| group > 0;
                    events.retain(|event| {
                        !matches!(event, KvEvent::Removed { group, .. } if is_hidden(*group))
                    });
                }
                _ => {}
            }
        }
    }

    /// Whether the scheduler receives the event. Aborts are dropped if no row of their request has been sent.
    fn keeps_abort(&self, event: &SchedulerEvent) -> bool {
        match event {
            SchedulerEvent::Abort { request, .. } => self.sequences.contains_key(request),
            _ => true,
        }
    }

    /// Changes an output that was already received, so that it seems to be the output of the oldest step in
    /// flight.
    fn relabel_repeated_output(
        &mut self,
        replica: Replica,
        output: &mut StepOutput,
        scheduler: &Scheduler,
    ) {
        let epoch = scheduler.epoch(replica);
        let Some(steps) = self.steps_in_flight.get_mut(&replica) else { return };
        while steps.pop_front_if(|sent| sent.epoch != epoch).is_some() {}
        let Some(oldest) = steps.front() else { return };
        let fits = output.epoch == epoch && output.rows.len() == oldest.rows;
        if fits && output.step <= oldest.step {
            output.step = oldest.step;
            steps.pop_front();
        }
    }

    fn alter_batch(&mut self, replica: Replica, batch: &mut Batch) {
        let sent = SentStep { step: batch.step, epoch: batch.epoch, rows: batch.rows.len() };
        self.steps_in_flight.entry(replica).or_default().push_back(sent);
        if self.injects(InjectedFault::RankPadsIndependently) {
            let tokens = batch.rows.iter().map(|row| row.len + u32::from(row.drafts)).sum();
            batch.moe_tokens = batch.moe_tokens.min(tokens);
        }
        let mut slot_before = None;
        for row in &mut batch.rows {
            self.alter_row(batch.step, row);
            slot_before = self.alter_state_slots(row, slot_before);
        }
    }

    fn alter_row(&mut self, step: StepId, row: &mut BatchRow) {
        let mut sequence = self.sequences.get(&row.request).copied().unwrap_or_default();
        let sent_before = sequence.table_entries;
        if let Some(init) = &row.seq_init {
            sequence.prompt_len = init.prompt_len;
            sequence.table_entries = 0;
        }
        let kept = match self.fault {
            Some(InjectedFault::BlockTableNotResent) if row.seq_init.is_some() => sent_before,
            Some(InjectedFault::DeduplicationNotSent) => sequence.table_entries,
            _ => 0,
        };
        if let Some(update) = row.table_updates.iter().find(|update| update.group == 0) {
            sequence.table_entries = update.first_entry + update.blocks.len() as u32;
        }
        remove_entries_below(row, kept);
        self.alter_window_tables(row, sent_before > 0);
        let host_fed = !matches!(row.input, RowInput::SampledAt { .. });
        self.alter_input(row, sequence);
        if row.samples && host_fed {
            sequence.host_fed_step = step;
        }
        let at_prompt_end = row.epoch > 0 && row.start + row.len == sequence.prompt_len;
        row.samples |= at_prompt_end && self.injects(InjectedFault::SampleAtPromptEnd);
        self.sequences.insert(row.request, sequence);
    }

    /// Alters the changes of block tables other than the first. `was_sent`: a row of the request was sent before.
    fn alter_window_tables(&self, row: &mut BatchRow, was_sent: bool) {
        let is_first = row.seq_init.is_some();
        match self.fault {
            Some(InjectedFault::WindowTableOffByOne) => {
                for update in row.table_updates.iter_mut().filter(|update| update.group > 0) {
                    update.first_entry += u32::from(is_first);
                }
            }
            Some(InjectedFault::WindowTablesMixedUp) => {
                let last = row.table_updates.iter().map(|update| update.group).max().unwrap_or(0);
                for update in row.table_updates.iter_mut().filter(|update| update.group == 1) {
                    update.group = if last > 1 { last } else { 0 };
                }
            }
            Some(InjectedFault::WindowGrowthNotSent) if !is_first => {
                row.table_updates.retain(|update| update.group == 0);
            }
            Some(InjectedFault::WindowTableNotResent) if is_first && was_sent => {
                row.table_updates.retain(|update| update.group == 0);
            }
            _ => {}
        }
    }

    /// Alters the state slots of a row; `slot_before` is the slot that the row before it in the batch reads in the first
    /// state group. Returns the slot that this row reads.
    fn alter_state_slots(
        &mut self,
        row: &mut BatchRow,
        slot_before: Option<StateSlot>,
    ) -> Option<StateSlot> {
        let first = *row.state_slots.first()?;
        let sequence = self.sequences.entry(row.request).or_default();
        let former_source = sequence.fork_source;
        let forks = first.read.is_some_and(|read| read != first.write);
        sequence.fork_source = first.read.filter(|_| forks);
        let (fault, resumes) = (self.fault, row.seq_init.is_some());
        let access = &mut row.state_slots[0];
        match fault {
            Some(InjectedFault::StateOfOtherRow) if access.read.is_some() => {
                access.read = slot_before.or(access.read);
            }
            Some(InjectedFault::StateNotRestored) if access.read.is_some() && resumes => {
                access.read = Some(access.write);
            }
            Some(InjectedFault::StateForkOverwritesCheckpoint) if !resumes => {
                access.write = access.read.unwrap_or(access.write);
            }
            Some(InjectedFault::StaleStateRestored) if !forks && access.read.is_some() => {
                access.read = former_source.or(access.read);
            }
            Some(InjectedFault::StateWrittenToOtherSlot) if row.samples && !resumes => {
                access.write = StateSlot(access.write.0.saturating_sub(1));
            }
            _ => {}
        }
        first.read
    }

    /// If the scheduler has not received the input token of a row yet, alters the step from which the row
    /// takes this token.
    fn alter_input(&self, row: &mut BatchRow, sequence: SentSlotState) {
        let RowInput::SampledAt { step, draft_slack } = &mut row.input else { return };
        match self.fault {
            Some(InjectedFault::DraftSlackNotSent) => *draft_slack = 0,
            Some(InjectedFault::StaleSequenceSlotRead) => *step = sequence.host_fed_step,
            _ => {}
        }
    }
}

/// Lengthens the output limit of a new request by one token if the context length allows it.
fn lengthen_limit(submit: &mut RequestSubmission, scheduler: &Scheduler) {
    let length = submit.tokens.len() as u64 + u64::from(submit.max_tokens);
    submit.max_tokens += u32::from(length < u64::from(scheduler.limits().max_model_len));
}

/// Removes the cache salt of a new request; the scheduler then computes block keys without it.
fn remove_salt(submit: &mut RequestSubmission) {
    submit.extra_keys = None;
    submit.block_keys.clear();
}

fn is_empty_batch(effect: &SchedulerEffect) -> bool {
    matches!(effect, SchedulerEffect::SendBatch { batch, .. } if batch.rows.is_empty())
}

/// Removes the entries with an index below `kept` from the changes of a row's block table in the first group.
fn remove_entries_below(row: &mut BatchRow, kept: u32) {
    for update in row.table_updates.iter_mut().filter(|update| update.group == 0) {
        let missing = kept.saturating_sub(update.first_entry).min(update.blocks.len() as u32);
        update.blocks.drain(..missing as usize);
        update.first_entry += missing;
    }
    row.table_updates.retain(|update| !update.blocks.is_empty());
}
