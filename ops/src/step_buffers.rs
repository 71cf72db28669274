//! Device arrays of a step: one copy uploads the staged inputs, `prepare` lays out the arrays, the forward
//! pass reads them, and `sample` adds the sampled tokens. All arrays are allocated at start-up, with full
//! size and a fixed address.

use device::{CopyInFlight, DType, MatRef, PinnedBuffer};
use kernels::step::{
    DraftVerification, PreparedStep, ReplayShape, RowMetadataField, SampledToken,
    SamplerOutputArrays, StagingBuffer, StagingBufferView, StepInputArrays,
};
use kernels::{
    AllGatherFn, BatchUpperBounds, RowSampling, StepPreparation, VocabParallelSampling, VocabShard,
};

use crate::{DeviceBatchMetadata, DeviceSequenceSlots, OpError, Ops, Tensor};

/// Size of a `SampledToken` in 32-bit words.
const SAMPLE_WORDS: usize = size_of::<SampledToken>() / 4;

// `StepBuffers::view` takes the first row of `row_facts` as sequence slots.
const _: () = assert!(RowMetadataField::SequenceSlot as usize == 0);

/// Maximum sizes of all steps, for which the step buffers are allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepBufferLimits {
    /// Maximum number of tokens per step.
    pub tokens: usize,
    /// Maximum number of rows per step.
    pub rows: usize,
    /// Maximum number of logits rows per step.
    pub logits_rows: usize,
    /// Maximum number of top log-probabilities that a logits row can report.
    pub top_logprobs: usize,
    /// Maximum size in bytes of the stage: the inputs of a step, which one copy uploads to the device.
    pub stage_bytes: usize,
    /// Number of KV groups.
    pub groups: usize,
    /// Token positions per KV block.
    pub block_tokens: usize,
    /// Rule by which draft tokens are accepted.
    pub verification: DraftVerification,
}

/// Sizes of one step: the sizes of its staged inputs, or larger sizes for a captured graph.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Number of tokens.
    pub tokens: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of logits rows, for each of which a token is sampled or scored.
    pub logits_rows: usize,
    /// Upper bounds of the rows (such as the longest row and the longest context); for a captured graph, the
    /// bounds of all steps that replay it.
    pub bounds: BatchUpperBounds,
    /// Sizes of the updates of recurrent states after sampling.
    pub replay: ReplayShape,
}

/// Device memory of the inputs and sampler outputs of a step.
#[derive(Debug)]
pub struct StepBuffers {
    pub(crate) size: StepBufferLimits,
    pub(crate) stage: Tensor,     // i32 [1, stage_bytes / 4]
    pub(crate) ids: Tensor,       // i32 [1, tokens]
    pub(crate) positions: Tensor, // i32 [1, tokens]
    slots: Tensor,                // i64 [groups, tokens]
    cu_q: Tensor,                 // i32 [1, rows + 1]
    context_lens: Tensor,         // i32 [1, rows]
    row_facts: Tensor,            // i32 [facts, rows]
    logits_indices: Tensor,       // i32 [1, logits_rows]
    sampled: Tensor,              // i32 [logits_rows, 4]
    top_ids: Tensor,              // i32 [logits_rows, top_logprobs]
    top_logprobs: Tensor,         // f32 [logits_rows, top_logprobs]
}

impl StepBuffers {
    /// Allocates memory for steps up to `size`.
    pub fn new(ops: &Ops, size: StepBufferLimits) -> Result<Self, OpError> {
        let words = |n: usize| ops.zeros(DType::I32, &[1, n]);
        Ok(Self {
            size,
            stage: words(size.stage_bytes.div_ceil(4))?,
            ids: words(size.tokens)?,
            positions: words(size.tokens)?,
            slots: ops.zeros(DType::I64, &[size.groups, size.tokens])?,
            cu_q: words(size.rows + 1)?,
            context_lens: words(size.rows)?,
            row_facts: ops.zeros(DType::I32, &[RowMetadataField::COUNT, size.rows])?,
            logits_indices: words(size.logits_rows)?,
            sampled: ops.zeros(DType::I32, &[size.logits_rows, SAMPLE_WORDS])?,
            top_ids: ops.zeros(DType::I32, &[size.logits_rows, size.top_logprobs])?,
            top_logprobs: ops.zeros(DType::F32, &[size.logits_rows, size.top_logprobs])?,
        })
    }

    /// Starts the copy of a stage (the inputs of a step) to the device. `memory` must have at least
    /// `stage_bytes` bytes; the finished copy returns it.
    pub fn upload(
        &mut self,
        ops: &Ops,
        stage: &StagingBuffer,
        mut memory: PinnedBuffer,
    ) -> Result<CopyInFlight, OpError> {
        let bytes = stage.write(memory.bytes_mut());
        Ok(ops.device.start_upload(&ops.stream, self.stage.buffer_mut()?, memory, bytes)?)
    }

    /// Updates the sequence slots from the uploaded stage (the inputs of a step), and computes the arrays
    /// that the forward pass reads: token ids, positions, KV slots, row boundaries and others.
    pub fn prepare(
        &mut self,
        ops: &Ops,
        seq_slots: &mut DeviceSequenceSlots,
        shape: StepShape,
    ) -> Result<(), OpError> {
        let stage = view(&self.stage, shape)?;
        let mut step = StepInputArrays {
            ids: self.ids.mat_mut()?,
            positions: self.positions.mat_mut()?,
            slots: self.slots.mat_mut()?,
            cu_q: self.cu_q.mat_mut()?,
            context_lens: self.context_lens.mat_mut()?,
            row_facts: self.row_facts.mat_mut()?,
            logits_indices: self.logits_indices.mat_mut()?,
        };
        let (s, block_tokens) = (&ops.stream, self.size.block_tokens);
        ops.device.launch(
            s,
            StepPreparation {
                stage: &stage,
                slots: &mut seq_slots.arrays()?,
                step: &mut step,
                block_tokens,
            },
        )?;
        Ok(())
    }

    /// Returns the inputs of a forward pass over a prepared step: its batch, and the token ids, i32
    /// `[tokens]`.
    pub fn view(
        &self,
        seq_slots: &DeviceSequenceSlots,
        shape: StepShape,
    ) -> Result<(DeviceBatchMetadata, Tensor), OpError> {
        let StepShape { tokens, rows, .. } = shape;
        let tables = &seq_slots.tables;
        let batch = DeviceBatchMetadata {
            positions: self.positions.narrow(&[tokens])?,
            slots: self.slots.narrow(self.slots.shape())?,
            cu_q: self.cu_q.narrow(&[rows + 1])?,
            context_lens: self.context_lens.narrow(&[rows])?,
            block_tables: tables.narrow(tables.shape())?,
            table_rows: Some(self.row_facts.narrow(&[rows])?), // Row `RowMetadataField::SequenceSlot`.
            row_facts: Some(self.row_facts.narrow(self.row_facts.shape())?),
            bounds: shape.bounds,
            replay: shape.replay,
        };
        Ok((batch, self.ids.narrow(&[tokens])?))
    }

    /// Returns the sample positions of the first `n` logits rows, as indices of the step's tokens, i32 `[n]`.
    pub fn logits_indices(&self, n: usize) -> Result<Tensor, OpError> {
        self.logits_indices.narrow(&[n])
    }

    /// Samples a token for each row of `logits`, f32 `[logits rows, vocabulary]`: the first logits rows of
    /// the step.
    pub fn sample(
        &mut self,
        ops: &Ops,
        seq_slots: &mut DeviceSequenceSlots,
        logits: &Tensor,
    ) -> Result<(), OpError> {
        let SamplerArgs { stage, prepared, mut outputs } = self.sampler_args(logits.rows())?;
        ops.device.launch(
            &ops.stream,
            RowSampling {
                logits: logits.mat()?,
                stage: &stage,
                prepared: &prepared,
                slots: &mut seq_slots.arrays()?,
                outputs: &mut outputs,
            },
        )?;
        Ok(())
    }

    /// Samples from vocab-parallel logits: each rank has the logits of its `shard` of the vocabulary, f32
    /// `[logits rows, shard.cols]`; `gather` all-gathers the candidates of all ranks.
    /// `vocab_parallel_support` of the device states which logits rows are supported, by their top-k.
    pub fn sample_vocab_parallel(
        &mut self,
        ops: &Ops,
        seq_slots: &mut DeviceSequenceSlots,
        logits: &Tensor,
        shard: &VocabShard,
        gather: &mut AllGatherFn<'_>,
    ) -> Result<(), OpError> {
        let SamplerArgs { stage, prepared, mut outputs } = self.sampler_args(logits.rows())?;
        ops.device.launch(
            &ops.stream,
            VocabParallelSampling {
                logits: logits.mat()?,
                shard,
                stage: &stage,
                prepared: &prepared,
                slots: &mut seq_slots.arrays()?,
                outputs: &mut outputs,
                gather,
            },
        )?;
        Ok(())
    }

    /// Returns the arguments with which the sampler samples the first `n` logits rows of the step.
    fn sampler_args(&mut self, n: usize) -> Result<SamplerArgs<'_>, OpError> {
        let stage = view(&self.stage, StepShape { logits_rows: n, ..StepShape::default() })?;
        let (ids, positions) = (self.ids.mat()?, self.positions.mat()?);
        let prepared = PreparedStep { ids, positions, verification: self.size.verification };
        let outputs = SamplerOutputArrays {
            sampled: self.sampled.mat_mut()?,
            top_ids: self.top_ids.mat_mut()?,
            top_logprobs: self.top_logprobs.mat_mut()?,
        };
        Ok(SamplerArgs { stage, prepared, outputs })
    }

    /// Returns the stage (the uploaded inputs) of a prepared step, and the positions of its tokens, i32 `[1,
    /// maximum tokens]`.
    pub(crate) fn staged(&self) -> Result<(MatRef<'_>, MatRef<'_>), OpError> {
        Ok((self.stage.mat()?, self.positions.mat()?))
    }

    /// Allocates pinned host memory for the sampler outputs of a step.
    pub fn output_memory(&self, ops: &Ops) -> Result<SamplerOutputHostBuffers, OpError> {
        let pinned = |tensor: &Tensor| ops.device.alloc_pinned(tensor.len() * 4);
        Ok(SamplerOutputHostBuffers {
            sampled: pinned(&self.sampled)?,
            top_ids: pinned(&self.top_ids)?,
            top_logprobs: pinned(&self.top_logprobs)?,
        })
    }

    /// Starts the copy of the first `logits_rows` sampled tokens to the host. Their top log-probabilities are
    /// copied as well if `with_top_logprobs`.
    pub fn download(
        &self,
        ops: &Ops,
        memory: SamplerOutputHostBuffers,
        logits_rows: usize,
        with_top_logprobs: bool,
    ) -> Result<SamplerOutputsInFlight, OpError> {
        let start = |from: &Tensor, to: PinnedBuffer, rows: usize| {
            let bytes = rows * from.cols() * 4;
            ops.device
                .start_download(&ops.stream, from.buffer(), to, bytes)
                .map(OutputArrayDownload::InFlight)
        };
        let start_top = |from: &Tensor, to: PinnedBuffer| {
            if with_top_logprobs {
                start(from, to, logits_rows)
            } else {
                Ok(OutputArrayDownload::Idle(to))
            }
        };
        let top_ids = start_top(&self.top_ids, memory.top_ids)?;
        let top_logprobs = start_top(&self.top_logprobs, memory.top_logprobs)?;
        let sampled = start(&self.sampled, memory.sampled, logits_rows)?;
        let sizes = SamplerOutputSizes { logits_rows, top: self.size.top_logprobs };
        Ok(SamplerOutputsInFlight { sizes, sampled, top_ids, top_logprobs })
    }
}

/// Arguments of the sampler, except the logits and the sequence slots.
struct SamplerArgs<'a> {
    stage: StagingBufferView<'a>,
    prepared: PreparedStep<'a>,
    outputs: SamplerOutputArrays<'a>,
}

/// Pinned host memory for the sampler outputs of one step.
#[derive(Debug)]
pub struct SamplerOutputHostBuffers {
    sampled: PinnedBuffer,
    top_ids: PinnedBuffer,
    top_logprobs: PinnedBuffer,
}

/// Sampler outputs that are being copied to the host.
#[derive(Debug)]
pub struct SamplerOutputsInFlight {
    sizes: SamplerOutputSizes,
    sampled: OutputArrayDownload,
    top_ids: OutputArrayDownload,
    top_logprobs: OutputArrayDownload,
}

/// Sizes of the sampler outputs of one step.
#[derive(Debug, Clone, Copy)]
struct SamplerOutputSizes {
    logits_rows: usize,
    /// Number of entries in a list of top log-probabilities.
    top: usize,
}

/// Copy of one output array to pinned host memory; `Idle` contains the memory if the array is not copied in
/// this step.
#[derive(Debug)]
enum OutputArrayDownload {
    Idle(PinnedBuffer),
    InFlight(CopyInFlight),
}

impl OutputArrayDownload {
    fn wait(self) -> Result<PinnedBuffer, OpError> {
        match self {
            Self::Idle(memory) => Ok(memory),
            Self::InFlight(copy) => Ok(copy.wait()?),
        }
    }
}

/// Sampler outputs on the host.
#[derive(Debug)]
pub struct SamplerOutputs {
    sizes: SamplerOutputSizes,
    memory: SamplerOutputHostBuffers,
}

impl SamplerOutputsInFlight {
    /// Waits until the copies to the host are complete; returns the sampler outputs.
    pub fn wait(self) -> Result<SamplerOutputs, OpError> {
        let (top_ids, top_logprobs) = (self.top_ids.wait()?, self.top_logprobs.wait()?);
        let memory =
            SamplerOutputHostBuffers { sampled: self.sampled.wait()?, top_ids, top_logprobs };
        Ok(SamplerOutputs { sizes: self.sizes, memory })
    }
}

impl SamplerOutputs {
    /// Returns the sampled tokens, in the order of the logits rows.
    pub fn iter(&self) -> impl Iterator<Item = SampledToken> + '_ {
        let bytes =
            &self.memory.sampled.bytes()[..self.sizes.logits_rows * size_of::<SampledToken>()];
        bytes.as_chunks::<16>().0.iter().map(|raw| {
            let word = |i: usize| [raw[4 * i], raw[4 * i + 1], raw[4 * i + 2], raw[4 * i + 3]];
            SampledToken {
                token: i32::from_ne_bytes(word(0)),
                status: u32::from_ne_bytes(word(1)),
                logprob: f32::from_ne_bytes(word(2)),
                rank: u32::from_ne_bytes(word(3)),
            }
        })
    }

    /// Returns the first `n` top tokens of logits row `q`, with their log-probabilities.
    pub fn top(&self, q: usize, n: usize) -> impl Iterator<Item = (u32, f32)> + '_ {
        let words = |memory: &'_ PinnedBuffer| {
            let top = self.sizes.top;
            let row = &memory.bytes()[q * top * 4..][..n.min(top) * 4];
            row.as_chunks::<4>().0.to_vec()
        };
        let (ids, values) = (words(&self.memory.top_ids), words(&self.memory.top_logprobs));
        let pair = |(id, value)| (u32::from_ne_bytes(id), f32::from_ne_bytes(value));
        ids.into_iter().zip(values).map(pair)
    }

    /// Returns the host memory, to be reused for another step.
    #[must_use]
    pub fn into_memory(self) -> SamplerOutputHostBuffers {
        self.memory
    }
}

/// Returns a view of the uploaded stage (the inputs of a step) for kernels.
fn view(stage: &Tensor, shape: StepShape) -> Result<StagingBufferView<'_>, OpError> {
    let StepShape { tokens, rows, logits_rows, .. } = shape;
    Ok(StagingBufferView { bytes: stage.mat()?, rows, tokens, logits_rows })
}
