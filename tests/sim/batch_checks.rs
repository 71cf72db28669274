//! Invariants of every batch, checked when the batch is sent to the simulated executors. I3: a block that the
//! step writes is in exactly one block table. I7: block tables cover exactly the positions that the request
//! may use. I23: rows have valid state slots, and no row accesses a slot that another row of the step writes. I8: token and sequence budgets are not exceeded. I16: the step ids of a replica increase, and its
//! steps have the current epoch. I18: the number of steps in flight is bounded. Lockstep: all ranks of a
//! group take part in each step with equal parameters.

use crate::invariant::{CheckResult, ensure};
use crate::sim_config::SimConfig;
use protocol::{Batch, BatchRow, BlockId, RowInput, StepLaunchMode};
use std::collections::BTreeMap;

/// Checks the batches of one replica against the state that its executors have after the earlier batches.
#[derive(Debug, Default)]
pub(crate) struct BatchChecker {
    /// Number of steps of the replica that were sent and whose output has not arrived.
    pub(crate) in_flight: u32,
    last_step: u64,
    /// Block tables by sequence slot and KV group.
    block_tables: Vec<Vec<Vec<BlockId>>>,
    block_readers: Vec<u16>,
}

/// Maximum lengths, in tokens, of the request to which a row belongs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestLengthLimits {
    /// Maximum total length of prompt and output.
    pub(crate) max_len: u32,
    /// End position (exclusive) of the tokens that can be model inputs: all tokens except the last output
    /// token.
    pub(crate) forwarded_len: u32,
}

impl BatchChecker {
    /// Clears the state when new executors of the replica start. The id of the last step is kept.
    pub(crate) fn reset(&mut self) {
        self.block_tables.clear();
        self.in_flight = 0;
    }

    /// Checks a batch and records it. `limits_of` returns the length limits of the request to which a row
    /// belongs.
    pub(crate) fn check(
        &mut self,
        batch: &Batch,
        config: &SimConfig,
        limits_of: impl Fn(&BatchRow) -> RequestLengthLimits,
    ) -> CheckResult {
        let limits = &config.scheduler.limits;
        let step = batch.step.0;
        ensure!("I16", step > self.last_step, "step {step} follows step {}", self.last_step);
        self.last_step = step;
        self.in_flight += 1;
        let deep = self.in_flight <= limits.steps_in_flight;
        ensure!("I18", deep, "{} steps are in flight", self.in_flight);
        let tokens: u32 = batch.rows.iter().map(|r| r.len + u32::from(r.drafts)).sum();
        let rows = batch.rows.len() as u32;
        ensure!("I8", tokens <= limits.tokens_per_step, "step {step} forwards {tokens} tokens");
        ensure!("I8", rows <= limits.max_num_seqs, "step {step} has {rows} rows");
        check_dispatch(batch, tokens, config)?;
        for row in &batch.rows {
            self.check_row(row, config, limits_of(row))?;
        }
        check_chunks(batch, config)?;
        check_state_slots(batch, config)?;
        self.check_writers(batch, config)
    }

    /// Block tables of all groups of the request to which a row belongs.
    pub(crate) fn block_tables(&self, row: &BatchRow) -> &[Vec<BlockId>] {
        &self.block_tables[row.seq_slot.0 as usize]
    }

    fn check_row(
        &mut self,
        row: &BatchRow,
        config: &SimConfig,
        limits: RequestLengthLimits,
    ) -> CheckResult {
        let RequestLengthLimits { max_len: limit, forwarded_len: last } = limits;
        let (id, size) = (row.request.0, config.block_tokens());
        let (seq_slot, slots) = (row.seq_slot.0, config.scheduler.limits.max_num_seqs);
        ensure!("I8", seq_slot < slots, "request {id} uses sequence slot {seq_slot} of {slots}");
        ensure!("I8", row.len > 0, "request {id} has an empty row");
        let end = row.start + row.input.draft_slack() + row.len + u32::from(row.drafts);
        ensure!("I8", end <= last, "request {id} [{}, {end}) exceeds its limit {last}", row.start);
        let longest = config.scheduler.limits.tokens_per_chunk.unwrap_or(u32::MAX);
        ensure!("I8", row.len <= longest, "request {id} has a chunk of {}", row.len);
        let device_fed = matches!(row.input, RowInput::SampledAt { .. });
        ensure!(
            "I7",
            !device_fed || row.len == 1,
            "request {id}: {} ids from the sequence slot",
            row.len
        );
        let groups = config.kv_kinds().count();
        if self.block_tables.len() <= seq_slot as usize {
            self.block_tables.resize_with(seq_slot as usize + 1, || vec![Vec::new(); groups]);
        }
        let tables = &mut self.block_tables[seq_slot as usize];
        if row.seq_init.is_some() {
            tables.iter_mut().for_each(Vec::clear);
        }
        for update in &row.table_updates {
            let known = usize::from(update.group) < groups;
            ensure!("I7", known, "request {id}: update of group {} of {groups}", update.group);
            let table = &mut tables[usize::from(update.group)];
            table.resize(update.first_entry as usize, BlockId::NULL);
            table.extend_from_slice(&update.blocks);
        }
        let (least, most) = (end.div_ceil(size), limit.div_ceil(size));
        let tables = config.kv_kinds().zip(tables.iter()).enumerate();
        for (group, (_, table)) in tables.filter(|(_, (kind, _))| !kind.is_state()) {
            let blocks = table.len() as u32;
            ensure!(
                "I7",
                (least..=most).contains(&blocks),
                "request {id} [{}, {end}) of {limit}: {blocks} blocks in group {group}, expected \
                 {least} to {most}",
                row.start
            );
        }
        self.release_before_window(row, config);
        Ok(())
    }

    /// Removes the blocks that the row and later rows do not read, because the scheduler may have allocated them
    /// to other requests.
    fn release_before_window(&mut self, row: &BatchRow, config: &SimConfig) {
        let tables = &mut self.block_tables[row.seq_slot.0 as usize];
        for (kind, table) in config.kv_kinds().zip(tables) {
            let first_read = (kind.first_read(row.start) / config.block_tokens()) as usize;
            if !kind.is_state() {
                table[..first_read].fill(BlockId::NULL);
            }
        }
    }

    /// Checks that a block that this step writes has only one entry, in only one block table of all groups.
    fn check_writers(&mut self, batch: &Batch, config: &SimConfig) -> CheckResult {
        self.block_readers.clear();
        // The configured pool size bounds all block indices, because pools of restored executors are never
        // larger than configured.
        self.block_readers.resize(config.scheduler.kv.blocks as usize, 0);
        for row in &batch.rows {
            let tables = self.block_tables[row.seq_slot.0 as usize].iter().flatten();
            for block in tables.filter(|block| **block != BlockId::NULL) {
                self.block_readers[block.0 as usize] += 1;
            }
        }
        let size = config.block_tokens();
        let tables = |row: &'_ BatchRow| &self.block_tables[row.seq_slot.0 as usize];
        for (row, table) in
            batch.rows.iter().flat_map(|row| tables(row).iter().map(move |table| (row, table)))
        {
            let furthest = row.start + row.input.draft_slack();
            let last = (furthest + row.len + u32::from(row.drafts) - 1) / size;
            if table.is_empty() {
                continue; // State groups have no blocks.
            }
            for index in row.start / size..=last {
                let block = table[index as usize];
                let readers = self.block_readers[block.0 as usize];
                ensure!(
                    "I3",
                    readers == 1,
                    "request {} writes block {}, which is in {readers} block tables",
                    row.request.0,
                    block.0
                );
            }
        }
        Ok(())
    }
}

/// Checks the state slots of the rows: one access for each state group, a slot to read unless the row starts at
/// position 0, and no slot that a row writes and another row of the step reads or writes.
fn check_state_slots(batch: &Batch, config: &SimConfig) -> CheckResult {
    let mut writers = BTreeMap::new();
    let groups = (0..).zip(config.kv_kinds()).filter(|(_, kind)| kind.is_state());
    let groups: Vec<u8> = groups.map(|(group, _)| group).collect();
    for row in &batch.rows {
        let (id, start) = (row.request.0, row.start);
        let has_groups =
            row.state_slots.iter().map(|access| access.group).eq(groups.iter().copied());
        ensure!("I23", has_groups, "request {id}: {:?}", row.state_slots);
        for access in &row.state_slots {
            let slots = [Some(access.write), access.read];
            let in_pool = slots.iter().flatten().all(|s| s.0 < config.scheduler.kv.state_slots);
            let reads = access.read.is_some() == (start > 0);
            ensure!("I23", in_pool && reads, "request {id} at {start}: {access:?}");
            let other = writers.insert((access.group, access.write), id);
            ensure!("I23", other.is_none(), "requests {id} and {other:?} write {access:?}");
        }
    }
    for row in &batch.rows {
        for access in &row.state_slots {
            let writer = access.read.and_then(|slot| writers.get(&(access.group, slot)));
            let alone = writer.is_none_or(|&writer| writer == row.request.0);
            ensure!("I23", alone, "request {} reads {access:?} of {writer:?}", row.request.0);
        }
    }
    Ok(())
}

/// Checks that a prefill chunk that does not reach the end of the known tokens ends on a multiple of the
/// chunk quantum (the alignment of chunk ends in tokens). Only the first prefill chunk of a step may end
/// elsewhere, if it does not reach the next multiple. With state groups, chunks also end at checkpoints and before
/// masked tokens.
fn check_chunks(batch: &Batch, config: &SimConfig) -> CheckResult {
    let quantum = config.scheduler.limits.chunk_quantum(config.block_tokens());
    let mut has_prefill = false;
    for row in &batch.rows {
        let (id, start, end) = (row.request.0, row.start, row.start + row.len);
        if !row.samples
            && row.next_token.is_some()
            && end % quantum != 0
            && row.state_slots.is_empty()
        {
            let sliver = end / quantum * quantum <= start && !has_prefill;
            ensure!("A16", sliver, "request {id} has a chunk [{start}, {end}), quantum {quantum}");
        }
        has_prefill |= row.len > 1 || !row.samples || row.seq_init.is_some();
    }
    let decodes = batch.rows.iter().any(|row| matches!(row.input, RowInput::SampledAt { .. }));
    let mixes = decodes && has_prefill;
    let step = batch.step.0;
    ensure!(
        "A6",
        !mixes || config.scheduler.limits.mixed_batches,
        "step {step} mixes decodes and prefill"
    );
    Ok(())
}

/// Checks the dispatch mode (eager or captured graph): only lockstep groups pad eager steps, and a batch that
/// replays a captured graph has at most the graph's number of rows.
fn check_dispatch(batch: &Batch, tokens: u32, config: &SimConfig) -> CheckResult {
    let (step, rows) = (batch.step.0, batch.rows.len() as u32);
    match batch.dispatch {
        StepLaunchMode::Eager { tokens: bucket } => {
            let valid = bucket == tokens || config.scheduler.lockstep && bucket > tokens;
            ensure!("I8", valid, "step {step}: bucket of {bucket} for {tokens} tokens");
        }
        StepLaunchMode::Graph { rows: bucket, width } => {
            let captured = config.scheduler.capture_sizes.contains(&bucket);
            let decode = |row: &BatchRow| row.len == 1 && u32::from(row.drafts) < width;
            let fits = rows <= bucket && batch.rows.iter().all(decode);
            ensure!("I8", captured && fits, "step {step}: {:?}, {rows} rows", batch.dispatch);
        }
    }
    Ok(())
}

/// Checks the batches of one lockstep tick: every group step has a batch for every rank, with one dispatch
/// mode and one padded token count of the MoE layers.
pub(crate) fn check_lockstep(batches: &[&Batch], config: &SimConfig) -> CheckResult {
    let mut steps: BTreeMap<u64, Vec<&Batch>> = BTreeMap::new();
    for &batch in batches {
        steps.entry(batch.step.0).or_default().push(batch);
    }
    for (step, group) in steps {
        let ranks = group.len();
        let all = ranks == usize::from(config.scheduler.replicas);
        ensure!("A25", all, "group step {step} has {ranks} of {} ranks", config.scheduler.replicas);
        let first = group[0];
        let tokens = |b: &&Batch| b.rows.iter().map(|r| r.len + u32::from(r.drafts)).sum::<u32>();
        let padded = group.iter().map(tokens).max().unwrap_or(0);
        ensure!("A25", padded > 0, "group step {step} has no work");
        let graph = |b: &Batch| match b.dispatch {
            StepLaunchMode::Graph { rows, width } => Some((rows, width)),
            StepLaunchMode::Eager { .. } => None,
        };
        for batch in group {
            let (moe, same) = (batch.moe_tokens, graph(batch) == graph(first));
            ensure!(
                "A25",
                same,
                "group step {step}: {:?} and {:?}",
                batch.dispatch,
                first.dispatch
            );
            let drafting = batch.rows.iter().rposition(|row| row.drafts > 0).map_or(0, |i| i + 1);
            let (drafts, agreed) = (batch.draft_rows, batch.draft_rows == first.draft_rows);
            let fits = agreed && drafts as usize >= drafting;
            ensure!("A25", fits, "group step {step}: {drafting} of {drafts} rows draft");
            let (epoch, expected) = (batch.epoch, first.epoch);
            ensure!("A25", epoch == expected, "group step {step}: {epoch:?} and {expected:?}");
            ensure!("A25", moe >= padded && moe == first.moe_tokens, "group step {step}: {moe}");
            if let StepLaunchMode::Eager { tokens } = batch.dispatch {
                ensure!("A25", tokens == padded, "group step {step}: {:?}", batch.dispatch);
            }
        }
    }
    Ok(())
}
