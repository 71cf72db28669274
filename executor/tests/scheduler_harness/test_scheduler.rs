//! The scheduler of the tests: it builds batches, submits them to all ranks of a replica, and applies their outputs.

use super::harness_request::{HarnessRequest, HarnessRequestChunk};
use super::lockstep_group::{FollowerRank, LockstepGroup, take_rank};
use super::model_configs::config;
use super::request_tables::RequestTables;
use super::scripted_bitmasks::{ConstrainedRow, ScriptedBitmaskSource};
use crate::deadlines::THREAD_TIMEOUT;
use executor::{Executor, ExecutorConfig, KvCacheSize, ModelDtype, SubmittedStep};
use protocol::{
    Batch, BatchRow, BlockId, Epoch, KvKind, Rank, RequestId, RowError, RowInput, SequenceInit,
    SequenceSlot, StateSlot, StateSlotAccess, StepId, StepLaunchMode, StepOutput,
};
use std::sync::Arc;

/// A test scheduler with its executor and free blocks; with several ranks, it drives all ranks of a replica.
pub(crate) struct SchedulerHarness {
    pub(crate) executor: Executor,
    followers: Vec<FollowerRank>,
    /// Lockstep group of the replica (replicas that run every step together). A replica without lockstep is
    /// alone in its group.
    pub(crate) lockstep: Arc<LockstepGroup>,
    /// Kind of each KV group.
    groups: Vec<KvKind>,
    /// Kind of each state group.
    pub(crate) states: Vec<KvKind>,
    free: Vec<BlockId>,
    step: StepId,
    /// Whether decode rows refer to the step that sampled their token (`RowInput::SampledAt`) instead of
    /// containing the token.
    pub(crate) from_device: bool,
    /// Whether the bitmasks are overdue in every second step.
    pub(crate) overdue_bitmasks: bool,
    /// Maximum number of bitmasks of a row; the bitmasks after further draft tokens are overdue.
    pub(crate) masks_max: usize,
    /// Row counts of the captured graphs. Decode steps replay these graphs; empty = all steps are launched
    /// eagerly.
    pub(crate) graphs: Vec<u32>,
    /// Number of tokens in a decode row with the maximum number of draft tokens.
    tokens_per_row: u32,
}

impl SchedulerHarness {
    pub(crate) fn new(dtype: ModelDtype, threads: u32) -> Self {
        Self::with(config(dtype, threads))
    }

    pub(crate) fn with(config: ExecutorConfig) -> Self {
        let lockstep = Arc::new(LockstepGroup::new(&config));
        Self::of_replica(config, 0, lockstep)
    }

    /// Creates one of the replicas of a lockstep group.
    pub(crate) fn of_replica(
        mut config: ExecutorConfig,
        replica: u16,
        lockstep: Arc<LockstepGroup>,
    ) -> Self {
        let KvCacheSize::Blocks(blocks) = config.settings.kv_cache_size else {
            panic!("kv_cache_size is not a number of blocks")
        };
        config.settings.rendezvous = Some(lockstep.rendezvous.path().to_owned());
        let width = 1 + config.settings.speculative.map_or(0, |how| u32::from(how.draft_tokens));
        let follow = |rank| FollowerRank::start(config.clone(), Rank(rank), blocks);
        let tp_size = lockstep.parallel.tp_size;
        let first = replica * tp_size;
        let followers = (first + 1..first + tp_size).map(follow).collect();
        take_rank(&mut config, Rank(first));
        let mut executor = Executor::load(config, &mut |_| {}).unwrap();
        let kinds = executor.kv_spec().groups.iter().map(|group| group.kind);
        let (states, groups) = kinds.partition(|kind| kind.is_state());
        let graphs = executor.size_kv(blocks, &mut |_| {}).unwrap().capture_sizes;
        // The order of the free blocks is a permutation, so that requests get non-contiguous blocks.
        let free = (0..blocks).map(|i| BlockId(i * 229 % blocks)).collect();
        Self {
            executor,
            followers,
            lockstep,
            groups,
            states,
            free,
            step: StepId(0),
            from_device: false,
            overdue_bitmasks: false,
            masks_max: usize::MAX,
            graphs,
            tokens_per_row: width,
        }
    }

    pub(crate) fn free(&mut self, tables: RequestTables) {
        self.free.extend(tables.groups.into_iter().flat_map(|table| table.blocks).flatten());
    }

    /// Runs one step with the next tokens of each request, and applies the step's output to the requests.
    pub(crate) fn step(&mut self, requests: &mut [HarnessRequestChunk<'_>]) -> StepOutput {
        let (rows, output) = self.try_step(requests);
        for ((chunk, row), result) in requests.iter_mut().zip(&rows).zip(&output.rows) {
            let request = &mut *chunk.request;
            if row.masked && self.is_bitmask_overdue() {
                assert_eq!(
                    (result.error, result.sampled_tokens.len()),
                    (Some(RowError::MaskOverdue), 0)
                );
                request.computed += row.len as usize - 1;
                let prompt = result.prompt.iter().flat_map(|prompt| prompt.logprobs.clone());
                request.prompt_logprobs.extend(prompt);
                request.sampled_at = None;
                continue;
            }
            request.apply_output(row, result);
        }
        output
    }

    /// Runs one step and returns its rows and its output. The output is not applied to the requests.
    pub(crate) fn try_step(
        &mut self,
        requests: &mut [HarnessRequestChunk<'_>],
    ) -> (Vec<BatchRow>, StepOutput) {
        let (batch, submitted) = self.submit(requests);
        self.complete_oldest(batch, submitted)
    }

    /// Submits a step with the next tokens of each request.
    fn submit(&mut self, requests: &mut [HarnessRequestChunk<'_>]) -> (Batch, SubmittedStep) {
        self.step = self.step.next();
        let rows: Vec<BatchRow> =
            requests.iter_mut().map(|chunk| self.row(chunk.request, chunk.len)).collect();
        // Replicas in lockstep (which run every step together) must replay the same graph, so they agree on
        // the maximum number of rows.
        let most_rows = self.lockstep.agree(rows.len() as u32);
        let tokens = |row: &BatchRow| row.len + u32::from(row.drafts);
        let longest = self.lockstep.agree(rows.iter().map(|row| row.len).max().unwrap_or(0));
        let most_tokens = self.lockstep.agree(rows.iter().map(tokens).sum());
        let drafting =
            rows.iter().rposition(|row| row.drafts > 0).map_or(0, |last| last as u32 + 1);
        let most_drafting = self.lockstep.agree_from(drafting);
        let captured = self.graphs.iter().find(|&&graph| graph >= most_rows && longest == 1);
        let width = self.tokens_per_row;
        let (dispatch, moe_tokens, draft_rows) = match captured {
            Some(&rows) => (StepLaunchMode::Graph { rows, width }, rows * width, rows),
            None => (StepLaunchMode::Eager { tokens: most_tokens }, most_tokens, most_drafting),
        };
        let (step, epoch) = (self.step, Epoch(1));
        let batch = Batch { step, epoch, dispatch, moe_tokens, draft_rows, rows };
        let masked = (0..).zip(requests.iter().zip(&batch.rows)).filter(|(_, (_, row))| row.masked);
        let rows =
            masked.map(|(row, (HarnessRequestChunk { request, .. }, batch_row))| ConstrainedRow {
                row,
                request: batch_row.request,
                last: request.tokens[request.tokens.len() - 1],
                awaits_drafts: batch_row.drafts > 0,
            });
        let masks_max = if self.is_bitmask_overdue() { 0 } else { self.masks_max };
        let mut masks =
            ScriptedBitmaskSource { step, rows: rows.collect(), drafts: None, masks_max };
        for follower in &self.followers {
            follower.batches.send((batch.clone(), masks.clone())).unwrap();
        }
        let submitted = self.executor.submit_with_bitmasks(&batch, &mut masks).unwrap();
        (batch, submitted)
    }

    /// Waits for the output of the oldest step, and checks that all ranks report the same output.
    fn complete_oldest(
        &mut self,
        batch: Batch,
        submitted: SubmittedStep,
    ) -> (Vec<BatchRow>, StepOutput) {
        let output = submitted.finish().unwrap();
        for (rank, follower) in (1..).zip(&self.followers) {
            let theirs = follower.outputs.recv_timeout(THREAD_TIMEOUT).unwrap();
            assert_eq!(theirs.rows, output.rows, "rank {rank} in step {}", batch.step.0);
        }
        assert_eq!((output.step, output.epoch), (batch.step, batch.epoch));
        assert_eq!(output.rows.len(), batch.rows.len());
        (batch.rows, output)
    }

    /// Whether the bitmasks of the current step are overdue.
    fn is_bitmask_overdue(&self) -> bool {
        self.overdue_bitmasks && !self.step.0.is_multiple_of(2)
    }

    /// State slots of a row that starts at `start`. Each sequence slot has a state slot of the same number, and some have a
    /// spare slot. A row with a grammar bitmask (`masked`) may have to be repeated and writes the other slot.
    fn state_slots(
        &self,
        request: &mut HarnessRequest,
        start: usize,
        masked: bool,
    ) -> protocol::ThinVec<StateSlotAccess> {
        const SPARE_SLOTS: u32 = 40;
        let slot = |in_spare: bool| {
            let spare = SPARE_SLOTS + request.seq_slot % 10;
            StateSlot(if in_spare { spare } else { request.seq_slot })
        };
        let write = slot(request.in_spare ^ masked);
        let own = slot(request.in_spare);
        let read = request.checkpoint.take().map_or(own, StateSlot);
        let read = (start > 0).then_some(read);
        let groups = self.groups.len() as u8..;
        let access = |(group, _)| StateSlotAccess { group, read, write };
        groups.zip(&self.states).map(access).collect()
    }

    fn row(&mut self, request: &mut HarnessRequest, len: usize) -> BatchRow {
        let (start, end, slack) = (request.start(), request.start() + len, request.in_flight[2]);
        let samples = end == request.expected_len() && request.sampling.pooling.is_none();
        let state_slots = self.state_slots(request, start, request.masked && samples);
        // The first row of a request has no sampled token that draft tokens could continue. The same holds
        // for its first row after a preemption.
        let drafts = if len == 1 && request.sampled_at.is_some() { request.drafts } else { 0 };
        let positions = start..end + slack + usize::from(drafts);
        let updates = request.table.update(&self.groups, positions, &mut self.free);
        let reads = request.sampling.needs_token_history() || request.drafts > 0;
        let init = std::mem::take(&mut request.needs_init).then(|| SequenceInit {
            sampling: request.sampling.clone(),
            rng_key: request.key,
            prompt_len: request.prompt_len as u32,
            token_history: if reads { request.tokens.clone() } else { Vec::new() },
        });
        let is_on_device_only = end > request.tokens.len();
        let from_device = is_on_device_only || self.from_device && len == 1 && !request.masked;
        let input = match request.sampled_at {
            Some(step) if from_device => RowInput::SampledAt { step, draft_slack: slack as u16 },
            _ => RowInput::Tokens(request.tokens[start..end].to_vec().into()),
        };
        request.sampled_at = samples.then_some(self.step);
        BatchRow {
            request: RequestId(request.id),
            epoch: request.epoch,
            seq_slot: SequenceSlot(request.seq_slot),
            start: start as u32,
            len: len as u32,
            drafts,
            samples,
            masked: request.masked && samples,
            input,
            table_updates: updates.into(),
            state_slots,
            next_token: request.tokens.get(end).copied(),
            seq_init: init.map(Box::new),
        }
    }

    /// Computes all known tokens of a request in chunks of `chunk` tokens, then decodes up to `total` tokens.
    pub(crate) fn finish(&mut self, request: &mut HarnessRequest, chunk: usize, total: usize) {
        while request.tokens.len() < total {
            let len = self.chunk_len(request, chunk);
            self.step(&mut [request.chunk(len)]);
        }
    }

    /// Returns the length of the next row of a request, `max` at most. With recurrent states, a token under a grammar bitmask is
    /// sampled by a row of one token, which can be repeated if the bitmask is overdue.
    fn chunk_len(&self, request: &HarnessRequest, max: usize) -> usize {
        let (remaining, len) = (request.remaining(), request.remaining().min(max));
        let is_split = !self.states.is_empty() && request.masked && len == remaining && len > 1;
        len - usize::from(is_split)
    }

    /// Runs several requests together until each has `total` tokens. The chunk sizes vary by step and
    /// request.
    pub(crate) fn finish_all(&mut self, requests: &mut [HarnessRequest], total: usize) {
        for turn in 0.. {
            let mut rows: Vec<HarnessRequestChunk<'_>> = Vec::new();
            for (i, request) in
                requests.iter_mut().enumerate().filter(|(_, request)| request.tokens.len() < total)
            {
                let len = self.chunk_len(request, 1 + (i * 5 + turn * 11) % 30);
                rows.push(request.chunk(len));
            }
            if rows.is_empty() {
                return;
            }
            rows.sort_by_key(|chunk| (chunk.len > 1, chunk.request.id)); // Decode rows come first.
            self.step(&mut rows);
        }
    }

    /// Runs several requests with two steps in flight: each step is submitted before the previous one is
    /// finished. `between_steps` is called after each submission and may change the requests.
    pub(crate) fn finish_async(
        &mut self,
        requests: &mut [HarnessRequest],
        total: usize,
        mut between_steps: impl FnMut(&mut Self, &mut [HarnessRequest], usize),
    ) {
        let mut ahead: Option<(Vec<usize>, Batch, SubmittedStep)> = None;
        for turn in 0.. {
            let mut rows: Vec<(usize, HarnessRequestChunk<'_>)> = Vec::new();
            for (i, request) in requests.iter_mut().enumerate() {
                let len = self.chunk_len(request, 1 + (i * 5 + turn * 11) % 30);
                if request.expected_len() < total && len > 0 {
                    rows.push((i, request.chunk(len)));
                }
            }
            rows.sort_by_key(|(i, chunk)| (chunk.len > 1, *i)); // Decode rows come first.
            let (indices, mut rows): (Vec<usize>, Vec<_>) = rows.into_iter().unzip();
            let next = (!rows.is_empty()).then(|| self.submit(&mut rows));
            let sent = next.iter().flat_map(|(batch, _)| &batch.rows);
            rows.iter_mut()
                .zip(sent)
                .for_each(|(chunk, row)| chunk.request.set_in_flight(row, false));
            between_steps(self, requests, turn);
            let over = ahead.is_none() && next.is_none();
            if let Some((indices, batch, submitted)) = ahead {
                let (rows, output) = self.complete_oldest(batch, submitted);
                for ((index, row), result) in indices.into_iter().zip(&rows).zip(&output.rows) {
                    let request = &mut requests[index];
                    if row.epoch == request.epoch {
                        request.set_in_flight(row, true);
                        request.apply_output(row, result);
                    }
                }
            }
            if over {
                return;
            }
            ahead = next.map(|(batch, submitted)| (indices, batch, submitted));
        }
    }
}
