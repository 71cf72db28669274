//! Stages a batch: converts the batch to the inputs that are copied to the device.

use super::bitmasks::StepBitmasks;
use super::context::StepContext;
use super::pooling::PooledRows;
use super::{StepState, logits_rows};
use crate::ExecutorError;
use crate::clock::ns_since;
use crate::model_context::ModelContext;
use crate::sequence_slots;
use crate::spec_decode::{DraftProposal, StagedRowDrafts};
use ops::StepShape;
use protocol::{Batch, BatchRow};

impl StepState {
    /// Checks the rows of the batch, and writes the rows, their draft tokens and the first slice of logits
    /// rows to the staging buffer.
    pub(super) fn stage(&mut self, context: &mut StepContext<'_>) -> Result<(), ExecutorError> {
        let batch = context.batch;
        self.stage_rows(context.model, batch)?;
        let proposer = self.proposer.as_mut();
        context.pending.emitted_tokens =
            proposer.and_then(|proposer| proposer.observe_outputs(&batch.rows));
        for (row, output) in batch.rows.iter().zip(&mut context.pending.rows) {
            output.drafted = self.seq_slots.get(row.seq_slot).drafts() as u8;
        }
        if context.is_idle() {
            return Ok(());
        }
        self.collect_output_rows(context);
        if !context.is_masked() {
            context.first_slice =
                self.stage_slice(batch, &StepBitmasks::default(), &context.logits_rows);
        }
        for row in batch.rows.iter().filter(|row| row.samples) {
            self.seq_slots.mark_sampled(row, batch.step);
        }
        context.pending.timing.inputs_ns = ns_since(context.pending.started);
        Ok(())
    }

    /// Sets the logits rows and the pooled rows of the step, and whether sampling needs full rows of logits.
    fn collect_output_rows(&mut self, context: &mut StepContext<'_>) {
        let batch = context.batch;
        context.logits_rows = std::mem::take(&mut self.logits_rows);
        let (slots, top) = (&self.seq_slots, self.size.top_logprobs);
        logits_rows::collect_logits_rows(batch, slots, top, &mut context.logits_rows);
        context.pooled_rows = PooledRows::collect(batch, slots);
        context.full_logits = logits_rows::needs_full_logits(
            &context.logits_rows,
            batch,
            slots,
            self.size.limits.vocab,
            context.model.vocab_parallel_support(),
        );
    }

    /// Stages the rows of the batch and the initial state of the sequence slots that they initialise. If the
    /// staging buffer has too little space for a sequence slot, the sequence slots staged so far are uploaded
    /// first.
    fn stage_rows(&mut self, model: &ModelContext, batch: &Batch) -> Result<(), ExecutorError> {
        self.size.limits.check(batch, model.dp.size() > 1)?;
        self.staging.stage.clear();
        self.table_changes.clear();
        for row in &batch.rows {
            self.seq_slots.update(row, &mut self.table_changes)?;
        }
        if let Some(proposer) = &mut self.proposer {
            proposer.observe(&batch.rows);
        }
        for row in &batch.rows {
            self.stage_drafts(row);
            self.stage_slot(model, row)?;
        }
        self.flush_if_rows_do_not_fit(model)?;
        let stage = &mut self.staging.stage;
        let changes = self.table_changes.chunks_exact(self.size.limits.groups);
        for (row, changes) in batch.rows.iter().zip(changes) {
            if let Some(proposer) = &mut self.proposer {
                let device_drafts = self.seq_slots.get(row.seq_slot).device_drafts;
                proposer.stage(
                    row,
                    StagedRowDrafts { token: stage.tokens, device_drafts },
                    stage,
                )?;
            }
            self.size.limits.stage_row(row, changes, &self.seq_slots, stage)?;
        }
        Ok(())
    }

    /// Writes the draft tokens that the host proposed for a row to the staging buffer, or records that the
    /// device will propose them.
    fn stage_drafts(&mut self, row: &BatchRow) {
        match self.proposer.as_mut().map(|proposer| proposer.propose(row)) {
            None => {}
            Some(DraftProposal::Tokens(drafts)) => {
                self.seq_slots.set_drafts(row, drafts, &mut self.staging.stage);
            }
            Some(DraftProposal::OnDevice) => self.seq_slots.expect_device_drafts(row),
        }
    }

    /// Stages the initial state of a row's sequence slot, if the row initialises the slot.
    fn stage_slot(&mut self, model: &ModelContext, row: &BatchRow) -> Result<(), ExecutorError> {
        let Some(init) = &row.seq_init else { return Ok(()) };
        let vocab = self.size.limits.vocab;
        // Number of words for the token history and the allowed ids of one request.
        let request_words = self.size.longest + sequence_slots::bitmask_words(vocab);
        let stage = &self.staging.stage;
        if stage.words.len() > 3 * request_words || stage.inits.len() >= self.size.limits.rows {
            self.flush(model)?;
        }
        sequence_slots::stage_init(row.seq_slot, init, vocab, &mut self.staging.stage);
        Ok(())
    }

    /// Uploads the sequence slots that have been staged, if the staging buffer has too little space for the
    /// token ids and block table changes of the step.
    fn flush_if_rows_do_not_fit(&mut self, model: &ModelContext) -> Result<(), ExecutorError> {
        let tables: usize = self.table_changes.iter().map(|change| change.blocks.len()).sum();
        let rows = self.size.limits.tokens + tables;
        if self.staging.stage.words.len() + rows > self.staging.words_max {
            self.flush(model)?;
        }
        Ok(())
    }

    /// Uploads the sequence slots that have been staged, so that the rest of the step can use the staging
    /// buffer.
    fn flush(&mut self, model: &ModelContext) -> Result<(), ExecutorError> {
        self.staging.upload(&model.ops, &mut self.device.buffers)?;
        let device = &mut self.device;
        device.buffers.prepare(&model.ops, &mut device.seq_slots, StepShape::default())?;
        self.staging.stage.clear();
        Ok(())
    }
}
