//! Rehearsal: compiles and tunes all kernels, and allocates all memory, of the steps that a host may run.

use ops::{
    BatchUpperBounds, DType, DeviceBatchMetadata, ForeignStepArrays, ForeignStepBatch,
    HostBatchMetadata, prompt_batches,
};

use crate::foreign_model::StepNumbers;
use crate::{ForeignModel, PluginError};

/// Up to this number of rows, a GEMM kernel may be specialised for the exact number of rows.
const SMALL_BATCH_ROWS: usize = 16;
/// Maximum number of tokens of a rehearsed step on the CPU, where memory is allocated on first use and a longer step would
/// only delay the start.
const CPU_TOKENS_MAX: usize = 512;

/// Row lengths of a rehearsed step, and the context length of its rows.
struct RehearsedStep {
    lens: Vec<u32>,
    context: usize,
}

impl RehearsedStep {
    fn numbers(&self) -> StepNumbers {
        StepNumbers {
            tokens: self.lens.iter().sum::<u32>() as usize,
            rows: self.lens.len(),
            decode_rows: self.lens.iter().take_while(|&&len| len == 1).count(),
            max_query_len: self.lens.iter().copied().max().unwrap_or(0) as usize,
            max_context_len: self.context,
        }
    }
}

impl ForeignModel {
    /// Compiles and tunes the kernels of all steps within the limits of the options, and allocates their memory. Later steps
    /// allocate nothing, compile nothing and never wait for the device.
    ///
    /// Errors: a kernel does not compile, or the device has too little memory.
    pub fn rehearse(&mut self) -> Result<(), PluginError> {
        let device = self.ops.device().clone();
        let steps = self.rehearsed_steps();
        if device.captures_graphs() {
            device.begin_dry_run();
            let launched = steps.iter().try_for_each(|step| self.rehearse_step(step));
            device.end_dry_run(&mut |_, _| {})?;
            launched?;
        }
        // Twice: the first run of a kernel may try several configurations, and the second finds all memory allocated.
        for step in steps.iter().chain(&steps) {
            self.rehearse_step(step)?;
        }
        device.synchronize(self.ops.stream())?;
        device.freeze_autotuning();
        Ok(())
    }

    /// Returns the steps to rehearse, those that need the most memory first.
    fn rehearsed_steps(&self) -> Vec<RehearsedStep> {
        let options = &self.options;
        let (longest, rows) = (options.max_model_len, options.max_num_rows);
        if !self.ops.device().captures_graphs() {
            let tokens = options.max_num_tokens.min(CPU_TOKENS_MAX).min(longest);
            let decode = vec![1; rows.min(tokens)];
            let step = |lens| RehearsedStep { lens, context: tokens };
            return [vec![tokens as u32], decode].map(step).into();
        }
        let tokens = options.max_num_tokens as u32;
        let mut prompts = prompt_batches(tokens, rows.min(options.max_num_tokens) as u32);
        prompts.reverse();
        // The step with the most keys that MLA projects up for prompts.
        let short = BatchUpperBounds::MLA_PREFILL_TOKENS as u32;
        let short_rows = rows.min((tokens / short) as usize);
        prompts.extend((short_rows > 0).then(|| vec![short; short_rows]));
        let decode_rows = options.capture_rows.iter().copied().chain([rows]);
        let mut decode_rows: Vec<usize> =
            decode_rows.chain(1..=SMALL_BATCH_ROWS.min(rows)).collect();
        decode_rows.retain(|&rows| rows <= options.max_num_tokens);
        decode_rows.sort_unstable();
        decode_rows.dedup();
        let decodes = decode_rows.into_iter().rev().map(|rows| vec![1; rows]);
        let step = |lens: Vec<u32>| RehearsedStep {
            lens: rows_within_context(&lens, longest, rows),
            context: longest,
        };
        let short = longest.min(BatchUpperBounds::SHORT_CONTEXT);
        let short_context = RehearsedStep { lens: vec![1], context: short };
        prompts.into_iter().chain(decodes).map(step).chain([short_context]).collect()
    }

    /// Runs a step of tokens whose keys and values are not stored, and the LM head for as many rows as the step has.
    fn rehearse_step(&mut self, step: &RehearsedStep) -> Result<(), PluginError> {
        let tokens = step.lens.iter().sum::<u32>() as usize;
        let mut inputs = HostBatchMetadata { cu_q: vec![0], ..HostBatchMetadata::default() };
        let width = step.context.div_ceil(self.options.block_tokens);
        for &len in &step.lens {
            let end = inputs.cu_q.last().copied().unwrap_or_default() + len as i32;
            inputs.cu_q.push(end);
            inputs.positions.extend(0..len as i32);
            inputs.context_lens.push(len as i32);
        }
        inputs.slots = vec![-1; tokens];
        // All keys are in the only block of the pool.
        inputs.block_tables = vec![0; width * step.lens.len()];
        let vocab = self.config.vocab;
        let ids: Vec<i32> = (0..tokens).map(|t| (t * 7919 % vocab) as i32).collect();
        let batch = self.prepare_rehearsal(&inputs, &ids, step.numbers().bounds())?;
        let rows = step.lens.len();
        if tokens > rows {
            let last: Vec<i32> = inputs.cu_q[1..].iter().map(|end| end - 1).collect();
            let output_tokens = self.ops.ids(&last)?;
            self.rehearse_batch(&batch.metadata, &batch.ids, Some(&output_tokens))?;
        }
        let hidden = self.rehearse_batch(&batch.metadata, &batch.ids, None)?;
        // Not in the arena, which would keep the memory: steps of a host have logits in memory of the host.
        let logits = self.ops.zeros(DType::F32, &[rows, self.config.vocab])?;
        self.head(&hidden.narrow(&[rows, self.config.hidden])?, logits)
    }

    /// Uploads the arrays of a step, and prepares them as those of a host.
    fn prepare_rehearsal(
        &mut self,
        inputs: &HostBatchMetadata,
        ids: &[i32],
        bounds: BatchUpperBounds,
    ) -> Result<ForeignStepBatch, PluginError> {
        let Self { ops, buffers, .. } = self;
        let uploaded = DeviceBatchMetadata::new(ops, inputs)?;
        let ids = ops.ids(ids)?;
        let host = ForeignStepArrays {
            ids: ids.mat()?,
            positions: uploaded.positions.mat()?,
            slots: uploaded.slots.mat()?,
            row_starts: Some(uploaded.cu_q.mat()?),
            context_lens: uploaded.context_lens.mat()?,
        };
        let rows = inputs.context_lens.len();
        let tables = ops.ids(&inputs.block_tables)?;
        let tables = tables.reshape(&[rows, inputs.block_tables.len() / rows])?;
        Ok(buffers.prepare(ops, host, tables, bounds)?)
    }
}

/// Splits rows that are longer than `longest` tokens. Returns at most `rows_max` rows.
fn rows_within_context(lens: &[u32], longest: usize, rows_max: usize) -> Vec<u32> {
    let longest = longest as u32;
    let split =
        |&len: &u32| (0..len).step_by(longest as usize).map(move |from| longest.min(len - from));
    lens.iter().flat_map(split).take(rows_max).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rehearsed_rows_fit_the_longest_context() {
        assert_eq!(rows_within_context(&[1, 1, 7937], 4096, 256), [1, 1, 4096, 3841]);
        assert_eq!(rows_within_context(&[8192], 4096, 256), [4096, 4096]);
        assert_eq!(rows_within_context(&[1, 1, 90], 40, 4), [1, 1, 40, 40]);
        assert_eq!(rows_within_context(&[16], 40, 4), [16]);
    }
}
