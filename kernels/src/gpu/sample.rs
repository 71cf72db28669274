//! GPU launches that sample one token per logits row of a step and verify draft tokens.

use device::gpu::{KernelLaunch, KernelSource};
use device::{
    DType, DeviceError, DeviceStream, MatRef, check_at_least, check_at_most, check_dense,
    check_dtype, check_size,
};

use super::step::check_sequence_slots;
use crate::gpu::GpuBackend;
use crate::step::{
    DraftVerification, PreparedStep, SampledToken, SamplerOutputArrays, SequenceSlotArrays,
    StagingBufferView,
};
use crate::{GpuKernel, RowSampling, VocabShard};

static SAMPLE: KernelSource = kernel_source!("sample/sample.hip");

const KERNEL: &str = "sample_rows";
/// Number of token ids per chunk of a logits row. `CHUNK`, `SCAN_THREADS`, `PICK_THREADS`, `VOCABULARY_MAX`
/// and `MAX_TOP` must match `CHUNK`, `SCAN_THREADS`, `PICK_THREADS`, `MAX_CHUNKS` and `LIST` in
/// `csrc/sample`.
const CHUNK: usize = 2048;
const SCAN_THREADS: u32 = 256;
pub(super) const PICK_THREADS: u32 = 512;
const VERIFY_THREADS: u32 = 256;
pub(super) const MAX_TOP: usize = 1024;
/// Size in bytes of a `ChunkRecord` (sample/chunk.h): the statistics of one chunk of a logits row.
const RECORD_BYTES: usize = 32;
/// Target number of blocks per SM of the scan kernel; with more logits rows, a block scans several chunks.
const BLOCKS_PER_MULTIPROCESSOR: usize = 32;

/// Logits rows of a step, of which this rank has a vocabulary shard.
#[derive(Clone, Copy)]
pub(super) struct ShardLogits<'a> {
    /// Logits of this shard, f32 `[logits_rows, shard.cols]`.
    pub(super) logits: MatRef<'a>,
    pub(super) shard: &'a VocabShard,
}

/// Staged inputs of a step, and the arrays that step preparation computed from them.
#[derive(Clone, Copy)]
pub(super) struct StagedStep<'a> {
    pub(super) stage: &'a StagingBufferView<'a>,
    pub(super) prepared: &'a PreparedStep<'a>,
}

impl ShardLogits<'_> {
    /// Appends the kernel arguments: vocabulary size, first and last id of the shard, and the row strides in
    /// elements of the logits and of the edited logits.
    pub(super) fn args(self, launch: KernelLaunch, edited_stride: usize) -> KernelLaunch {
        let Self { logits, shard } = self;
        launch
            .u32(shard.vocab as u32)
            .u32(shard.first_id as u32)
            .u32((shard.first_id + shard.ids) as u32)
            .u32(logits.stride() as u32)
            .u32(edited_stride as u32)
    }
}

impl StagedStep<'_> {
    /// Appends the kernel arguments: stage, positions, sampling parameters.
    pub(super) fn args(
        self,
        launch: KernelLaunch,
        seq_slots: &SequenceSlotArrays<'_>,
    ) -> KernelLaunch {
        launch.arg(self.stage.bytes).arg(self.prepared.positions).arg(seq_slots.params.as_ref())
    }
}

impl GpuBackend {
    /// Maximum number of columns of a logits row that is sampled.
    pub const VOCABULARY_MAX: usize = 256 * CHUNK;

    /// Reads the logits rows of a shard once, and writes statistics per chunk and the edited logits to
    /// scratch memory.
    pub(super) fn scan(
        &self,
        s: &DeviceStream,
        rows: ShardLogits<'_>,
        step: StagedStep<'_>,
        seq_slots: &SequenceSlotArrays<'_>,
        scratch: &SampleScratch,
    ) -> Result<(), DeviceError> {
        let ShardLogits { logits, shard } = rows;
        let row_blocks = self.scan_blocks_per_row(logits.rows(), shard.ids.div_ceil(CHUNK));
        let kernel = self.kernel(&SAMPLE, "sample_scan", &[])?;
        let launch =
            KernelLaunch::new(kernel, [row_blocks, logits.rows() as u32, 1], SCAN_THREADS, 0)
                .overlaps_predecessor()
                .arg_ptr(scratch.records)
                .arg_ptr(scratch.edited)
                .arg(logits)
                .arg(step.stage.bytes)
                .arg(step.prepared.positions)
                .arg(seq_slots.history.as_ref())
                .arg(seq_slots.masks.as_ref())
                .arg(seq_slots.params.as_ref());
        let launch = rows
            .args(launch, scratch.edited_stride)
            .u32(seq_slots.history.cols() as u32)
            .u32(seq_slots.masks.cols() as u32);
        // SAFETY: scratch memory has a record per chunk and an edited row per logits row; the host checked
        // the staged indices against the sequence slots.
        unsafe { launch.launch(self, s) }
    }

    /// Number of blocks of the scan kernel per logits row of `chunks` chunks.
    fn scan_blocks_per_row(&self, logits_rows: usize, chunks: usize) -> u32 {
        let target_blocks = self.multiprocessors() as usize * BLOCKS_PER_MULTIPROCESSOR;
        target_blocks.div_ceil(logits_rows.max(1)).min(chunks) as u32
    }

    fn pick_tokens(
        &self,
        s: &DeviceStream,
        logits: MatRef<'_>,
        step: StagedStep<'_>,
        seq_slots: &mut SequenceSlotArrays<'_>,
        outputs: &mut SamplerOutputArrays<'_>,
        scratch: &SampleScratch,
    ) -> Result<(), DeviceError> {
        let kernel = self.kernel(&SAMPLE, "sample_pick", &[])?;
        let launch = KernelLaunch::new(kernel, [logits.rows() as u32, 1, 1], PICK_THREADS, 0)
            .overlaps_predecessor()
            .out(&mut outputs.sampled)
            .out(&mut outputs.top_ids)
            .out(&mut outputs.top_logprobs)
            .out(&mut seq_slots.latest)
            .out(&mut seq_slots.history)
            .arg_ptr(scratch.records)
            .arg_ptr(scratch.edited)
            .arg(logits);
        let launch = step
            .args(launch, seq_slots)
            .u32(logits.cols() as u32)
            .u32(logits.stride() as u32)
            .u32(scratch.edited_stride as u32)
            .u32(seq_slots.history.cols() as u32)
            .u32(outputs.top_ids.cols() as u32);
        // SAFETY: scratch memory has a record per chunk and an edited row per logits row, and the outputs
        // have a row per logits row; the host checked the staged indices.
        unsafe { launch.launch(self, s) }
    }

    /// Launches the verification of draft tokens against the sampled tokens, if the step has draft tokens.
    pub(super) fn verify_drafts(
        &self,
        s: &DeviceStream,
        logits_rows: usize,
        step: StagedStep<'_>,
        seq_slots: &mut SequenceSlotArrays<'_>,
        outputs: &mut SamplerOutputArrays<'_>,
    ) -> Result<(), DeviceError> {
        let (per_mille, decrease) = match step.prepared.verification {
            DraftVerification::NoDrafts => return Ok(()),
            DraftVerification::MatchSampled => (-1, 0),
            DraftVerification::Synthetic { per_mille, decrease } => {
                (i32::from(per_mille), u32::from(decrease))
            }
        };
        let kernel = self.kernel(&SAMPLE, "sample_verify_drafts", &[])?;
        let grid = [(logits_rows as u32).div_ceil(VERIFY_THREADS).max(1), 1, 1];
        let launch = KernelLaunch::new(kernel, grid, VERIFY_THREADS, 0)
            .overlaps_predecessor()
            .out(&mut outputs.sampled)
            .out(&mut seq_slots.latest)
            .out(&mut seq_slots.history)
            .arg(step.prepared.ids)
            .arg(step.prepared.positions)
            .arg(step.stage.bytes)
            .arg(seq_slots.params.as_ref())
            .u32(logits_rows as u32)
            .u32(seq_slots.history.cols() as u32)
            .u32(per_mille.cast_unsigned())
            .u32(decrease);
        // SAFETY: the outputs have a row per logits row; the host checked the staged indices, and draft
        // tokens follow tokens of the step.
        unsafe { launch.launch(self, s) }
    }
}

impl GpuKernel for RowSampling<'_, '_, '_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { logits, stage, prepared, slots: seq_slots, outputs } = self;
        let whole = VocabShard::whole(logits.cols());
        let rows = ShardLogits { logits, shard: &whole };
        let step = StagedStep { stage, prepared };
        check(rows, prepared, seq_slots, outputs)?;
        let scratch = SampleScratch::new(gpu, s, logits, 0)?;
        gpu.scan(s, rows, step, seq_slots, &scratch)?;
        gpu.pick_tokens(s, logits, step, seq_slots, outputs, &scratch)?;
        gpu.verify_drafts(s, logits.rows(), step, seq_slots, outputs)
    }
}

/// Scratch memory of sampling: chunk statistics and edited logits that the scan kernel writes, and `rest` for
/// the candidate tokens that vocab-parallel sampling gathers from all ranks.
pub(super) struct SampleScratch {
    pub(super) records: *mut u8,
    pub(super) edited: *mut u8,
    pub(super) edited_stride: usize,
    pub(super) rest: *mut u8,
}

impl SampleScratch {
    /// Allocates scratch memory for the chunk statistics and edited logits of `logits`, and `rest` further
    /// bytes.
    pub(super) fn new(
        device: &GpuBackend,
        s: &DeviceStream,
        logits: MatRef<'_>,
        rest: usize,
    ) -> Result<Self, DeviceError> {
        let (logits_rows, vocabulary) = (logits.rows(), logits.cols());
        let record_bytes = logits_rows * vocabulary.div_ceil(CHUNK) * RECORD_BYTES;
        let edited_stride = vocabulary.next_multiple_of(4);
        let edited_bytes = logits_rows * edited_stride * 4;
        let records = device.scratch(s, record_bytes + edited_bytes + rest)?;
        // SAFETY: the addresses are inside the scratch memory.
        let (edited, rest) =
            unsafe { (records.add(record_bytes), records.add(record_bytes + edited_bytes)) };
        Ok(Self { records, edited, edited_stride, rest })
    }
}

pub(super) fn check(
    rows: ShardLogits<'_>,
    prepared: &PreparedStep<'_>,
    seq_slots: &SequenceSlotArrays<'_>,
    outputs: &SamplerOutputArrays<'_>,
) -> Result<(), DeviceError> {
    let ShardLogits { logits, shard } = rows;
    let logits_rows = logits.rows();
    check_dtype(KERNEL, "logits", logits.dtype(), DType::F32)?;
    check_dtype(KERNEL, "ids", prepared.ids.dtype(), DType::I32)?;
    check_dtype(KERNEL, "positions", prepared.positions.dtype(), DType::I32)?;
    check_size(KERNEL, "columns of logits", logits.cols(), shard.cols)?;
    check_at_most(KERNEL, "ids", shard.ids, shard.cols)?;
    check_at_most(KERNEL, "vocabulary", logits.cols(), GpuBackend::VOCABULARY_MAX)?;
    check_at_least(KERNEL, "vocabulary", shard.vocab, 1)?;
    check_sequence_slots(seq_slots)?;
    check_at_least(
        KERNEL,
        "words of grammar bitmasks",
        seq_slots.masks.cols(),
        shard.vocab.div_ceil(32),
    )?;
    check_size(
        KERNEL,
        "words per sampled token",
        outputs.sampled.cols(),
        size_of::<SampledToken>() / 4,
    )?;
    check_at_least(KERNEL, "sampled tokens", outputs.sampled.rows(), logits_rows)?;
    check_at_least(KERNEL, "rows of top-k token ids", outputs.top_ids.rows(), logits_rows)?;
    check_at_least(
        KERNEL,
        "rows of top-k log-probabilities",
        outputs.top_logprobs.rows(),
        logits_rows,
    )?;
    check_at_most(KERNEL, "top-k token ids", outputs.top_ids.cols(), MAX_TOP)?;
    check_size(
        KERNEL,
        "columns of top-k log-probabilities",
        outputs.top_logprobs.cols(),
        outputs.top_ids.cols(),
    )?;
    check_dtype(KERNEL, "sampled tokens", outputs.sampled.dtype(), DType::I32)?;
    check_dtype(KERNEL, "top-k token ids", outputs.top_ids.dtype(), DType::I32)?;
    check_dtype(KERNEL, "top-k log-probabilities", outputs.top_logprobs.dtype(), DType::F32)?;
    check_dense(KERNEL, "sampled tokens", outputs.sampled.as_ref())?;
    check_dense(KERNEL, "top-k token ids", outputs.top_ids.as_ref())?;
    check_dense(KERNEL, "top-k log-probabilities", outputs.top_logprobs.as_ref())
}
