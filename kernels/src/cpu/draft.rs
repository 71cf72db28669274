//! Ops before and after the forward passes of a draft model on the CPU. The GPU code for the same ops is
//! `csrc/draft`.

use device::{DType, DeviceElement, DeviceError, MatMut, MatRef, check_dtype, check_size};

use super::backend::for_float;
use super::step::index;
use crate::cpu::CpuBackend;
use crate::step::{DraftHiddenStates, StagedDraftRow, StagingReader};
use crate::{
    CpuKernel, DraftArgmax, DraftHiddenStateGather, DraftHiddenStateWrite, DraftIdTranslation,
    DraftInsertion, DraftPassPreparation, VocabParallelDraftArgmax,
};

impl CpuKernel for DraftInsertion<'_> {
    fn run(self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { stage, positions, rows, mut ids, mut history, drafts } = self;
        let read = StagingReader::new(stage)?;
        for (r, row) in read.drafts.iter().take(rows).enumerate() {
            let end = start_of(row, positions)? + row.len;
            let history = history.row_mut::<i32>(row.seq_slot as usize);
            for i in 0..row.drafts as usize {
                let id = drafts.row::<i32>(i)[r];
                ids.row_mut::<i32>(0)[(row.token + row.len) as usize + i] = id;
                if let Some(entry) = history.get_mut(end as usize + i) {
                    *entry = id;
                }
            }
        }
        Ok(())
    }
}

impl CpuKernel for DraftIdTranslation<'_> {
    fn run(self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { mut drafts, pass, count: rows, ids: target_ids } = self;
        for x in [drafts.dtype(), target_ids.dtype()] {
            check_dtype(KERNEL, "draft id map", x, DType::I32)?;
        }
        for draft in &mut drafts.row_mut::<i32>(pass)[..rows] {
            *draft = target_ids.row::<i32>(0)[index("draft", *draft, target_ids.cols())?];
        }
        Ok(())
    }
}

impl CpuKernel for VocabParallelDraftArgmax<'_, '_> {
    fn run(self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { mut drafts, pass, first, logits, shard, gather } = self;
        check_dtype(KERNEL, "logits", logits.dtype(), DType::F32)?;
        let rows = logits.rows();
        let local_best = |r: usize| {
            let local = &logits.row::<f32>(r)[..shard.ids];
            let best = argmax(local);
            // The candidate of an empty vocabulary shard has value −∞: the candidates of the other shards are
            // larger.
            let value = local.get(best).copied().unwrap_or(f32::NEG_INFINITY);
            [value.to_bits() as i32, (shard.first_id + best) as i32]
        };
        let candidates: Vec<i32> = (0..rows).flat_map(local_best).collect();
        let mut all = vec![0; candidates.len() * shard.ranks];
        let cols = all.len();
        let local = MatRef::of(&candidates, 1, candidates.len())?;
        if !gather(local, MatMut::of(&mut all, 1, cols)?) {
            return Err(DeviceError::PeerRanksFailed);
        }
        let to = &mut drafts.row_mut::<i32>(pass)[first..][..rows];
        for (r, to) in to.iter_mut().enumerate() {
            let of_ranks = all.chunks(2).skip(r).step_by(rows);
            let (values, ids): (Vec<f32>, Vec<i32>) =
                of_ranks.map(|words| (f32::from_bits(words[0] as u32), words[1])).unzip();
            *to = ids[argmax(&values)];
        }
        Ok(())
    }
}

impl CpuKernel for DraftArgmax<'_> {
    fn run(self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { mut drafts, pass, first, logits } = self;
        check_dtype(KERNEL, "logits", logits.dtype(), DType::F32)?;
        let to = &mut drafts.row_mut::<i32>(pass)[first..][..logits.rows()];
        for (r, to) in to.iter_mut().enumerate() {
            *to = argmax(logits.row::<f32>(r)) as i32;
        }
        Ok(())
    }
}

impl CpuKernel for DraftHiddenStateWrite<'_, '_> {
    fn run(self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { stage, positions, states, hidden, rows, tables, block_tokens } = self;
        let tables = DraftBlockTables { tables, block_tokens };
        check_states(hidden.dtype(), hidden.cols(), states)?;
        let read = StagingReader::new(stage)?;
        for row in read.drafts.iter().take(rows) {
            let start = start_of(row, positions)?;
            for_float!(KERNEL, hidden.dtype(), T => {
                store_state::<T>(row, start, states, hidden, &tables)?;
            });
        }
        Ok(())
    }
}

impl CpuKernel for DraftHiddenStateGather<'_> {
    fn run(self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { stage, positions, rows, mut y, hidden, states } = self;
        check_states(y.dtype(), y.cols(), states)?;
        let read = StagingReader::new(stage)?;
        for (r, row) in read.drafts.iter().take(rows).enumerate() {
            let first = if hidden.is_some() { row.token as usize } else { r };
            let start = start_of(row, positions)?;
            for_float!(KERNEL, y.dtype(), T => {
                y.row_mut::<T>(first).copy_from_slice(&preceding_state::<T>(row, start, states)?);
            });
            let Some(hidden) = hidden else { continue };
            for t in first + 1..first + (row.len + row.drafts) as usize {
                for_float!(KERNEL, y.dtype(), T => {
                    y.row_mut::<T>(t).copy_from_slice(hidden.row(t - 1));
                });
            }
        }
        Ok(())
    }
}

impl CpuKernel for DraftPassPreparation<'_, '_> {
    fn run(self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { stage, arrays: to, pass } = self;
        let read = StagingReader::new(stage)?;
        to.cu_q.row_mut::<i32>(0)[0] = 0;
        for r in 0..pass.rows {
            let row = read.drafts.get(r).copied().unwrap_or_default();
            // The inputs are initialised as those of a padding row. A row that proposes at most `pass.pass`
            // draft tokens is a padding row in this pass.
            let mut inputs = DraftRowInputs { id: 0, position: 0, slot: -1, context_len: 0 };
            if (pass.pass as i32) < row.drafts {
                let start = start_of(&row, pass.positions)?;
                let position = (start + row.len - 1) as usize + pass.pass;
                let newest = (row.token + row.len - 1) as usize;
                let id = match pass.pass.checked_sub(1) {
                    None => pass.ids.row::<i32>(0)[newest],
                    Some(previous) => pass.drafts.row::<i32>(previous)[r],
                };
                let tables =
                    DraftBlockTables { tables: pass.tables, block_tokens: pass.block_tokens };
                inputs = DraftRowInputs {
                    id,
                    position: position as i32,
                    slot: tables.kv_slot(&row, position)?,
                    context_len: position as i32 + 1,
                };
            }
            to.ids.row_mut::<i32>(0)[r] = inputs.id;
            to.positions.row_mut::<i32>(0)[r] = inputs.position;
            to.slots.row_mut::<i64>(0)[r] = inputs.slot;
            to.context_lens.row_mut::<i32>(0)[r] = inputs.context_len;
            to.row_seq_slots.row_mut::<i32>(0)[r] = row.seq_slot;
            to.cu_q.row_mut::<i32>(0)[r + 1] = r as i32 + 1;
        }
        Ok(())
    }
}

const KERNEL: &str = "draft";

fn check_states(
    dtype: DType,
    channels: usize,
    states: &DraftHiddenStates<'_>,
) -> Result<(), DeviceError> {
    for x in [&states.slot_states, &states.boundary_states] {
        check_dtype(KERNEL, "states", x.dtype(), dtype)?;
        check_size(KERNEL, "channels", x.cols(), channels)?;
    }
    Ok(())
}

/// Returns the position of the first token of `row`, read from the token positions of the step.
fn start_of(row: &StagedDraftRow, positions: MatRef<'_>) -> Result<i32, DeviceError> {
    Ok(positions.row::<i32>(0)[index("token", row.token, positions.cols())?])
}

/// Inputs of one row in a forward pass of a draft model: one token, with its position, KV slot and context
/// length.
struct DraftRowInputs {
    id: i32,
    position: i32,
    slot: i64,
    context_len: i32,
}

/// Block tables by sequence slot, i32 `[sequence_slots, blocks]`.
struct DraftBlockTables<'a> {
    tables: MatRef<'a>,
    block_tokens: usize,
}

impl DraftBlockTables<'_> {
    /// Returns the KV slot of position `position` of the request that `row` belongs to.
    fn kv_slot(&self, row: &StagedDraftRow, position: usize) -> Result<i64, DeviceError> {
        let seq_slot = index("sequence slot", row.seq_slot, self.tables.rows())?;
        let (table, block_tokens) = (self.tables.row::<i32>(seq_slot), self.block_tokens);
        let block = table[index("table", (position / block_tokens) as i32, table.len())?];
        Ok(i64::from(block) * block_tokens as i64 + (position % block_tokens) as i64)
    }
}

/// Returns the hidden state at position `start − 1`, where `start` is the position of the first token of
/// `row`: the boundary state of the preceding KV block, or the state in the sequence slot; zeros if neither
/// is stored.
fn preceding_state<T: DeviceElement + Default>(
    row: &StagedDraftRow,
    start: i32,
    states: &DraftHiddenStates<'_>,
) -> Result<Vec<T>, DeviceError> {
    if row.boundary_block >= 0 {
        let block = index("boundary block", row.boundary_block, states.boundary_states.rows())?;
        return Ok(states.boundary_states.as_ref().row::<T>(block).to_vec());
    }
    if row.state_in_slot == 0 {
        return Ok(vec![T::default(); states.slot_states.cols()]);
    }
    let seq_slot = index("sequence slot", row.seq_slot, states.first_positions.cols())?;
    let offset = start - 1 - states.first_positions.as_ref().row::<i32>(0)[seq_slot];
    let offset = index("slot state", offset, states.states_per_slot)?;
    let state_row = seq_slot * states.states_per_slot + offset;
    Ok(states.slot_states.as_ref().row::<T>(state_row).to_vec())
}

/// Stores hidden states of `row`, whose first token is at position `start`: the states of its newest tokens
/// in `slot_states`, and the states of tokens at the end of a KV block in `boundary_states`.
fn store_state<T: DeviceElement + Default>(
    row: &StagedDraftRow,
    start: i32,
    states: &mut DraftHiddenStates<'_>,
    hidden: MatRef<'_>,
    tables: &DraftBlockTables<'_>,
) -> Result<(), DeviceError> {
    let (first, last) = (row.token as usize, row.len as usize - 1);
    let tokens = (row.len + row.drafts) as usize;
    let newest = start + last as i32;
    let states_per_slot = states.states_per_slot;
    let mut slot_states = Vec::with_capacity(states_per_slot);
    if newest > 0 {
        slot_states.push(match last.checked_sub(1) {
            None => preceding_state::<T>(row, start, states)?,
            Some(i) => hidden.row::<T>(first + i).to_vec(),
        });
    }
    slot_states.extend((last..tokens).map(|i| hidden.row::<T>(first + i).to_vec()));
    check_size(KERNEL, "slot states", slot_states.len().max(states_per_slot), states_per_slot)?;
    for (i, state) in slot_states.iter().enumerate() {
        let state_row = row.seq_slot as usize * states_per_slot + i;
        states.slot_states.row_mut::<T>(state_row).copy_from_slice(state);
    }
    states.first_positions.row_mut::<i32>(0)[row.seq_slot as usize] = (newest - 1).max(0);
    for i in 0..tokens {
        let position = start as usize + i;
        if (position + 1).is_multiple_of(tables.block_tokens) {
            let block = tables.kv_slot(row, position)? as usize / tables.block_tokens;
            states.boundary_states.row_mut::<T>(block).copy_from_slice(hidden.row(first + i));
        }
    }
    Ok(())
}

/// Index of the largest value, the lowest index among equals; 0 for an empty slice.
fn argmax(logits: &[f32]) -> usize {
    let larger = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).fold(0, larger)
}
