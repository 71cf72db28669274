//! Turns the rows of a batch into the arrays a forward pass reads.
//!
//! `T` tokens, `R` rows, `W` the longest block table of the step. All arrays have their full capacity
//! from the start and are rewritten by every step.

use crate::BatchError;
use crate::seats::Seats;
use ops::BatchInputs;
use protocol::{Batch, Input, Row, Token};
use std::ops::Range;

/// Bounds of a step, fixed at start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepLimits {
    /// Tokens per step.
    pub(crate) tokens: usize,
    /// Rows per step.
    pub(crate) rows: usize,
    /// Positions per KV block.
    pub(crate) block_tokens: u32,
    /// Entries of the longest block table.
    pub(crate) width: usize,
    /// Size of the vocabulary.
    pub(crate) vocab: usize,
}

/// Host side of a step's inputs.
#[derive(Debug)]
pub(crate) struct Inputs {
    limits: StepLimits,
    /// Token ids, `[T]`.
    pub(crate) ids: Vec<i32>,
    /// Positions, slots, lengths and tables.
    pub(crate) batch: BatchInputs,
}

impl Inputs {
    /// Arrays for steps within `limits`.
    pub(crate) fn new(limits: StepLimits) -> Self {
        let StepLimits { tokens, rows, width, .. } = limits;
        let batch = BatchInputs {
            positions: Vec::with_capacity(tokens),
            slots: Vec::with_capacity(tokens),
            cu_q: Vec::with_capacity(rows + 1),
            context_lens: Vec::with_capacity(rows),
            block_tables: Vec::with_capacity(rows * width),
            last_rows: Vec::with_capacity(rows),
        };
        Self { limits, ids: Vec::with_capacity(tokens), batch }
    }

    /// Fills the arrays from a batch whose rows `seats` has taken over.
    pub(crate) fn build(&mut self, batch: &Batch, seats: &Seats) -> Result<(), BatchError> {
        let tokens = batch.rows.iter().map(|row| row.len as usize).sum();
        if tokens > self.limits.tokens || batch.rows.len() > self.limits.rows {
            return Err(BatchError::Tokens { tokens, limit: self.limits.tokens });
        }
        self.clear();
        for row in &batch.rows {
            self.push_ids(row, seats)?;
            self.push_places(row, seats.table(row.seat))?;
            let end = self.ids.len() as i32;
            self.batch.cu_q.push(end);
            self.batch.context_lens.push((row.start + row.len) as i32);
            if row.samples {
                self.batch.last_rows.push(end - 1);
            }
        }
        self.gather_tables(batch, seats);
        Ok(())
    }

    fn clear(&mut self) {
        self.ids.clear();
        let BatchInputs { positions, slots, cu_q, context_lens, block_tables, last_rows } =
            &mut self.batch;
        positions.clear();
        slots.clear();
        cu_q.clear();
        cu_q.push(0);
        context_lens.clear();
        block_tables.clear();
        last_rows.clear();
    }

    fn push_ids(&mut self, row: &Row, seats: &Seats) -> Result<(), BatchError> {
        let request = row.request;
        if row.drafts > 0 {
            return Err(BatchError::Drafts { request });
        }
        let sampled;
        let ids = match &row.input {
            Input::Tokens(ids) => &ids[..],
            Input::SampledAt(step) => {
                let token = seats.get(row.seat).sampled_at(*step);
                sampled = [token.ok_or(BatchError::NotSampled { request, step: step.0 })?];
                &sampled
            }
        };
        if ids.len() != row.len as usize || ids.is_empty() {
            return Err(BatchError::Length { request, len: row.len, given: ids.len() });
        }
        let limit = self.limits.vocab;
        let known = |token: Token| (token as usize) < limit;
        if let Some(&token) = ids.iter().find(|&&token| !known(token)) {
            return Err(BatchError::Vocabulary { request, token, limit });
        }
        self.ids.extend(ids.iter().map(|&token| token as i32));
        Ok(())
    }

    /// Positions and slots: position `p` lies in slot `table[p / bs] · bs + p mod bs`.
    fn push_places(&mut self, row: &Row, table: &[i32]) -> Result<(), BatchError> {
        let block_tokens = self.limits.block_tokens;
        for position in row.start..row.start + row.len {
            let Some(&block) = table.get((position / block_tokens) as usize) else {
                let (request, entries) = (row.request, table.len());
                return Err(BatchError::Uncovered { request, position, entries });
            };
            self.batch.positions.push(position as i32);
            let first = i64::from(block) * i64::from(block_tokens);
            self.batch.slots.push(first + i64::from(position % block_tokens));
        }
        Ok(())
    }

    fn gather_tables(&mut self, batch: &Batch, seats: &Seats) {
        let used = |row: &Row| (row.start + row.len).div_ceil(self.limits.block_tokens) as usize;
        let width = batch.rows.iter().map(used).max().unwrap_or(0);
        let tables = &mut self.batch.block_tables;
        tables.resize(batch.rows.len() * width, 0);
        for (entries, row) in tables.chunks_mut(width.max(1)).zip(&batch.rows) {
            let used = used(row);
            entries[..used].copy_from_slice(&seats.table(row.seat)[..used]);
        }
    }

    /// Tokens of row `r` in `[0, T)`.
    pub(crate) fn tokens(&self, r: usize) -> Range<usize> {
        self.batch.cu_q[r] as usize..self.batch.cu_q[r + 1] as usize
    }
}
