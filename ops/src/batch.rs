//! Batch of a forward pass, on the host and on the device: positions, KV slots, row boundaries and block
//! tables.

use device::{DType, MatRef};
use kernels::step::{ReplayShape, RowMetadataField};
use kernels::{AttentionMetadata, BatchRowLengths, BatchUpperBounds, StateSlotRows};

use crate::error::check_size;
use crate::{OpError, Ops, Tensor};

/// Batch metadata on the host, as the executor lays it out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostBatchMetadata {
    /// Position of each token, `[tokens]`.
    pub positions: Vec<i32>,
    /// KV slot of each token in KV group 0, `[tokens]`; −1 = its key and value are not stored.
    pub slots: Vec<i64>,
    /// Row boundaries from 0 to the number of tokens, `[rows + 1]`: row `r` has the tokens from `cu_q[r]` up
    /// to, but not including, `cu_q[r + 1]`.
    pub cu_q: Vec<i32>,
    /// Context length of each row: number of its keys, including the keys of its tokens in this step,
    /// `[rows]`.
    pub context_lens: Vec<i32>,
    /// Block tables of all rows in KV group 0, `[rows, width]` with the width of the longest table; padding may
    /// have any value.
    pub block_tables: Vec<i32>,
    /// KV slots and block tables in the KV groups from 1 on; the tables have the width of those of group 0.
    pub further_groups: Vec<HostGroupTables>,
    /// State slots of each row, `[rows]`; empty = the model has no recurrent states.
    pub state_slots: Vec<HostStateSlots>,
}

/// State slots that a row reads and writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostStateSlots {
    /// Slot with the state before the row; `None` = the row starts with the zero state.
    pub read: Option<u32>,
    /// Slot to which the state after the row is written.
    pub write: u32,
}

/// KV slots and block tables of a batch in one KV group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostGroupTables {
    /// KV slot of each token, `[tokens]`; −1 = its key and value are not stored.
    pub slots: Vec<i64>,
    /// Block tables of all rows, `[rows, width]`; padding may have any value.
    pub block_tables: Vec<i32>,
}

impl HostBatchMetadata {
    /// Returns the bounds of the rows (such as the longest row and the longest context), by which kernels are
    /// selected.
    fn bounds(&self) -> BatchUpperBounds {
        let rows = self.cu_q.windows(2).zip(&self.context_lens);
        let lengths = rows.map(|(ends, &context)| BatchRowLengths {
            tokens: (ends[1] - ends[0]) as usize,
            context: context as usize,
        });
        BatchUpperBounds::of(lengths, 1)
    }
}

/// Batch metadata on the device.
#[derive(Debug)]
pub struct DeviceBatchMetadata {
    /// Position of each token; i32 `[tokens]`.
    pub positions: Tensor,
    /// KV slot of each token in each KV group; i64 `[groups, at least tokens]`. −1 = its key and value are not
    /// stored; padding tokens have −1 in all groups.
    pub slots: Tensor,
    /// Index of the first token of each row, then the number of tokens; i32 `[rows + 1]`.
    pub cu_q: Tensor,
    /// Context length of each row: number of its keys, including the keys of its tokens in this step; i32
    /// `[rows]`.
    pub context_lens: Tensor,
    /// Block tables of each KV group: i32 `[groups · rows, width]`; with `table_rows`, i32 `[groups · seq_slots,
    /// width]`, one table per group and sequence slot. The tables of group 0 come first.
    pub block_tables: Tensor,
    /// Index of the block table of each row within a group; i32 `[rows]`. `None` = row `r` uses table `r`.
    pub table_rows: Option<Tensor>,
    /// Metadata of each row, such as its sequence slot: one array row per [`RowMetadataField`], i32 `[fields,
    /// at least rows]`. `None` = the batch does not come from `StepBuffers`.
    pub row_facts: Option<Tensor>,
    /// Upper bounds of the rows (such as the longest row and the longest context), by which kernels are
    /// selected.
    pub bounds: BatchUpperBounds,
    /// Sizes of the updates of recurrent states after sampling.
    pub replay: ReplayShape,
}

impl DeviceBatchMetadata {
    /// Copies the metadata of a batch to the device.
    pub fn new(ops: &Ops, inputs: &HostBatchMetadata) -> Result<Self, OpError> {
        let rows = inputs.context_lens.len();
        check_size("batch", "cu_q", inputs.cu_q.len(), rows + 1)?;
        check_size("batch", "slots", inputs.slots.len(), inputs.positions.len())?;
        let width = inputs.block_tables.len() / rows.max(1);
        check_size("batch", "block_tables", inputs.block_tables.len(), width * rows)?;
        let (mut all_slots, mut all_tables) = (inputs.slots.clone(), inputs.block_tables.clone());
        for group in &inputs.further_groups {
            check_size("batch", "slots", group.slots.len(), inputs.slots.len())?;
            check_size("batch", "block_tables", group.block_tables.len(), width * rows)?;
            all_slots.extend(&group.slots);
            all_tables.extend(&group.block_tables);
        }
        let groups = 1 + inputs.further_groups.len();
        let mut slots = ops.scratch(DType::I64, &[groups, inputs.slots.len()])?;
        let bytes: Vec<u8> = all_slots.iter().flat_map(|slot| slot.to_le_bytes()).collect();
        ops.device.upload(slots.buffer_mut()?, 0, &bytes)?;
        Ok(Self {
            positions: ops.ids(&inputs.positions)?,
            slots,
            cu_q: ops.ids(&inputs.cu_q)?,
            context_lens: ops.ids(&inputs.context_lens)?,
            block_tables: ops.ids(&all_tables)?.reshape(&[groups * rows, width])?,
            table_rows: None,
            row_facts: state_facts(ops, &inputs.state_slots, rows)?,
            bounds: inputs.bounds(),
            replay: ReplayShape::default(),
        })
    }

    /// Number of tokens in the batch.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.positions.len()
    }

    /// Number of rows in the batch.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.context_lens.len()
    }

    /// Returns one metadata field of each row, such as its sequence slot; i32 `[1, rows]`. `None` = the batch
    /// does not come from `StepBuffers`.
    pub fn row_fact(&self, fact: RowMetadataField) -> Result<Option<MatRef<'_>>, OpError> {
        let Some(facts) = &self.row_facts else { return Ok(None) };
        Ok(Some(facts.mat()?.rows_from(fact as usize, 1).columns(0, self.rows())))
    }

    /// Returns the rows of the batch with the state slots that they read and write.
    pub(crate) fn state_rows(&self) -> Result<StateSlotRows<'_>, OpError> {
        let missing = || OpError::Pool { op: "batch", stores: "no state slots of its rows" };
        let [read, write] = [RowMetadataField::StateRead, RowMetadataField::StateWrite]
            .map(|fact| self.row_fact(fact)?.ok_or_else(missing));
        let (max_row_len, chunked_rows) =
            (self.bounds.max_query_len.max(1), self.bounds.chunked_rows);
        let cu_q = self.cu_q.mat()?;
        Ok(StateSlotRows { cu_q, read: read?, write: write?, max_row_len, chunked_rows })
    }

    /// Number of KV groups, each with its own block tables and KV slots.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.slots.rows()
    }

    /// Returns the KV slot of each token in KV group `group`; i64 `[1, tokens]`.
    pub(crate) fn kv_slots(&self, group: usize) -> Result<MatRef<'_>, OpError> {
        self.check_group(group)?;
        Ok(self.slots.mat()?.rows_from(group, 1).columns(0, self.tokens()))
    }

    /// Returns the rows of the batch with their block tables in KV group `group`.
    pub(crate) fn attention_metadata(
        &self,
        group: usize,
    ) -> Result<AttentionMetadata<'_>, OpError> {
        self.check_group(group)?;
        let tables = self.block_tables.rows() / self.groups();
        Ok(AttentionMetadata {
            cu_q: self.cu_q.mat()?,
            context_lens: self.context_lens.mat()?,
            block_tables: self.block_tables.mat()?.rows_from(group * tables, tables),
            table_rows: self.table_rows.as_ref().map(Tensor::mat).transpose()?,
            bounds: self.bounds,
        })
    }

    fn check_group(&self, group: usize) -> Result<(), OpError> {
        if group < self.groups() {
            return Ok(());
        }
        let (got, expected) = (vec![group], vec![self.groups()]);
        Err(OpError::Shape { op: "batch", what: "KV group", got, expected })
    }
}

/// Returns the row facts of a batch whose rows read and write state slots; `None` if there are no state slots.
fn state_facts(
    ops: &Ops,
    slots: &[HostStateSlots],
    rows: usize,
) -> Result<Option<Tensor>, OpError> {
    if slots.is_empty() {
        return Ok(None);
    }
    check_size("batch", "state slots", slots.len(), rows)?;
    let mut facts = vec![0; RowMetadataField::COUNT * rows];
    for (row, slots) in slots.iter().enumerate() {
        let read = slots.read.map_or(0, |slot| slot as i32 + 1);
        facts[RowMetadataField::StateRead as usize * rows + row] = read;
        facts[RowMetadataField::StateWrite as usize * rows + row] = slots.write as i32 + 1;
    }
    Ok(Some(ops.ids(&facts)?.reshape(&[RowMetadataField::COUNT, rows])?))
}
