//! Sampling of a token per logits row of a step, and verification of draft tokens.

use device::gpu::{KernelLaunch, KernelSource};
use device::{
    DType, DeviceError, DeviceStream, MatRef, check_at_least, check_at_most, check_dense,
    check_dtype, check_size,
};

use super::step::check_sequence_slots;
use crate::gpu::GpuBackend;
use crate::step::{
    DraftVerification, PreparedStep, SampledToken, SamplerOutputArrays, SequenceSlotArrays,
    StageView,
};
use crate::{GpuKernel, RowSampling, VocabShard};

static SAMPLE: KernelSource = kernel_source!("sample/sample.hip");

const KERNEL: &str = "sample_rows";
/// Vocabulary ids per chunk. `CHUNK`, `SCAN_THREADS`, `PICK_THREADS`, `MAX_VOCABULARY` and `MAX_TOP` must
/// match `CHUNK`, `SCAN_THREADS`, `PICK_THREADS`, `MAX_CHUNKS` and `LIST` in `csrc/sample`.
const CHUNK: usize = 2048;
const SCAN_THREADS: u32 = 256;
pub(super) const PICK_THREADS: u32 = 512;
const VERIFY_THREADS: u32 = 256;
const MAX_VOCABULARY: usize = 128 * CHUNK;
pub(super) const MAX_TOP: usize = 1024;
/// Size of a `ChunkRecord` in bytes.
const RECORD_BYTES: usize = 32;
/// Target number of scan blocks per SM; with more logits rows, a block scans several chunks.
const BLOCKS_PER_MULTIPROCESSOR: usize = 32;

impl GpuBackend {
    /// Reads a vocabulary shard of the logits rows once, and leaves statistics per chunk and edited logits in
    /// scratch memory.
    pub(super) fn scan(
        &self,
        s: &DeviceStream,
        (logits, part): (MatRef<'_>, &VocabShard),
        (stage, laid): (&StageView<'_>, &PreparedStep<'_>),
        seats: &SequenceSlotArrays<'_>,
        scratch: &SampleScratch,
    ) -> Result<(), DeviceError> {
        let (questions, chunks) = (logits.rows(), part.ids.div_ceil(CHUNK));
        let wanted = self.multiprocessors() as usize * BLOCKS_PER_MULTIPROCESSOR;
        let parts = wanted.div_ceil(questions.max(1)).min(chunks);
        let kernel = self.kernel(&SAMPLE, "sample_scan", &[])?;
        let launch =
            KernelLaunch::new(kernel, (parts as u32, questions as u32, 1), SCAN_THREADS, 0)
                .overlaps_predecessor()
                .arg_ptr(scratch.records)
                .arg_ptr(scratch.edited)
                .arg(logits)
                .arg(stage.bytes)
                .arg(laid.positions)
                .arg(seats.history.as_ref())
                .arg(seats.masks.as_ref())
                .arg(seats.params.as_ref())
                .u32(part.vocab as u32)
                .u32(part.first_id as u32)
                .u32((part.first_id + part.ids) as u32)
                .u32(logits.stride() as u32)
                .u32(scratch.edited_stride as u32)
                .u32(seats.history.cols() as u32)
                .u32(seats.masks.cols() as u32);
        // SAFETY: scratch memory has a record per chunk and an edited row per logits row; the host checked
        // the staged indices against the sequence slots.
        unsafe { launch.launch(self, s) }
    }

    fn pick_tokens(
        &self,
        s: &DeviceStream,
        logits: MatRef<'_>,
        (stage, laid): (&StageView<'_>, &PreparedStep<'_>),
        seats: &mut SequenceSlotArrays<'_>,
        answers: &mut SamplerOutputArrays<'_>,
        scratch: &SampleScratch,
    ) -> Result<(), DeviceError> {
        let kernel = self.kernel(&SAMPLE, "sample_pick", &[])?;
        let launch = KernelLaunch::new(kernel, (logits.rows() as u32, 1, 1), PICK_THREADS, 0)
            .overlaps_predecessor()
            .out(&mut answers.sampled)
            .out(&mut answers.top_ids)
            .out(&mut answers.top_logprobs)
            .out(&mut seats.latest)
            .out(&mut seats.history)
            .arg_ptr(scratch.records)
            .arg_ptr(scratch.edited)
            .arg(logits)
            .arg(stage.bytes)
            .arg(laid.positions)
            .arg(seats.params.as_ref())
            .u32(logits.cols() as u32)
            .u32(logits.stride() as u32)
            .u32(scratch.edited_stride as u32)
            .u32(seats.history.cols() as u32)
            .u32(answers.top_ids.cols() as u32);
        // SAFETY: scratch memory has a record per chunk and an edited row per logits row, and the outputs
        // have a row per logits row; the host checked the staged indices.
        unsafe { launch.launch(self, s) }
    }

    /// Verifies draft tokens against the sampled tokens, if the step has drafts.
    pub(super) fn verify_drafts(
        &self,
        s: &DeviceStream,
        questions: usize,
        (stage, laid): (&StageView<'_>, &PreparedStep<'_>),
        seats: &mut SequenceSlotArrays<'_>,
        answers: &mut SamplerOutputArrays<'_>,
    ) -> Result<(), DeviceError> {
        let per_mille = match laid.verification {
            DraftVerification::NoDrafts => return Ok(()),
            DraftVerification::MatchSampled => -1,
            DraftVerification::Synthetic { per_mille } => i32::from(per_mille),
        };
        let kernel = self.kernel(&SAMPLE, "sample_verify_drafts", &[])?;
        let grid = ((questions as u32).div_ceil(VERIFY_THREADS).max(1), 1, 1);
        let launch = KernelLaunch::new(kernel, grid, VERIFY_THREADS, 0)
            .overlaps_predecessor()
            .out(&mut answers.sampled)
            .out(&mut seats.latest)
            .out(&mut seats.history)
            .arg(laid.ids)
            .arg(laid.positions)
            .arg(stage.bytes)
            .arg(seats.params.as_ref())
            .u32(questions as u32)
            .u32(seats.history.cols() as u32)
            .u32(per_mille.cast_unsigned());
        // SAFETY: the outputs have a row per logits row; the host checked the staged indices, and draft
        // tokens follow tokens of the step.
        unsafe { launch.launch(self, s) }
    }
}

impl GpuKernel for RowSampling<'_, '_, '_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { logits, stage, prepared: laid, slots: seats, outputs: answers } = self;
        let whole = VocabShard::whole(logits.cols());
        check((logits, &whole), laid, seats, answers)?;
        let scratch = SampleScratch::new(gpu, s, logits, 0)?;
        gpu.scan(s, (logits, &whole), (stage, laid), seats, &scratch)?;
        gpu.pick_tokens(s, logits, (stage, laid), seats, answers, &scratch)?;
        gpu.verify_drafts(s, logits.rows(), (stage, laid), seats, answers)
    }
}

/// Scratch memory of sampling: chunk records and edited logits written by the scan, and memory for later
/// kernels.
pub(super) struct SampleScratch {
    pub(super) records: *mut u8,
    pub(super) edited: *mut u8,
    pub(super) edited_stride: usize,
    pub(super) rest: *mut u8,
}

impl SampleScratch {
    /// Allocates scratch memory for the rows of `logits`, and `rest` further bytes.
    pub(super) fn new(
        device: &GpuBackend,
        s: &DeviceStream,
        logits: MatRef<'_>,
        rest: usize,
    ) -> Result<Self, DeviceError> {
        let (questions, vocabulary) = (logits.rows(), logits.cols());
        let record_bytes = questions * vocabulary.div_ceil(CHUNK) * RECORD_BYTES;
        let edited_stride = vocabulary.next_multiple_of(4);
        let edited_bytes = questions * edited_stride * 4;
        let records = device.scratch(s, record_bytes + edited_bytes + rest)?;
        // SAFETY: the addresses are inside the scratch memory.
        let (edited, rest) =
            unsafe { (records.add(record_bytes), records.add(record_bytes + edited_bytes)) };
        Ok(Self { records, edited, edited_stride, rest })
    }
}

pub(super) fn check(
    (logits, part): (MatRef<'_>, &VocabShard),
    laid: &PreparedStep<'_>,
    seats: &SequenceSlotArrays<'_>,
    answers: &SamplerOutputArrays<'_>,
) -> Result<(), DeviceError> {
    let questions = logits.rows();
    check_dtype(KERNEL, "logits", logits.dtype(), DType::F32)?;
    check_dtype(KERNEL, "ids", laid.ids.dtype(), DType::I32)?;
    check_dtype(KERNEL, "positions", laid.positions.dtype(), DType::I32)?;
    check_size(KERNEL, "columns of logits", logits.cols(), part.cols)?;
    check_at_most(KERNEL, "ids", part.ids, part.cols)?;
    check_at_most(KERNEL, "vocabulary", logits.cols(), MAX_VOCABULARY)?;
    check_at_least(KERNEL, "vocabulary", part.vocab, 1)?;
    check_sequence_slots(seats)?;
    check_at_least(KERNEL, "words of masks", seats.masks.cols(), part.vocab.div_ceil(32))?;
    check_size(
        KERNEL,
        "width of an answer",
        answers.sampled.cols(),
        size_of::<SampledToken>() / 4,
    )?;
    check_at_least(KERNEL, "answers", answers.sampled.rows(), questions)?;
    check_at_least(KERNEL, "rows of likeliest ids", answers.top_ids.rows(), questions)?;
    check_at_least(KERNEL, "rows of their values", answers.top_logprobs.rows(), questions)?;
    check_at_most(KERNEL, "likeliest ids", answers.top_ids.cols(), MAX_TOP)?;
    check_size(
        KERNEL,
        "columns of their values",
        answers.top_logprobs.cols(),
        answers.top_ids.cols(),
    )?;
    check_dtype(KERNEL, "answers", answers.sampled.dtype(), DType::I32)?;
    check_dtype(KERNEL, "likeliest ids", answers.top_ids.dtype(), DType::I32)?;
    check_dtype(KERNEL, "their values", answers.top_logprobs.dtype(), DType::F32)?;
    check_dense(KERNEL, "answers", answers.sampled.as_ref())?;
    check_dense(KERNEL, "likeliest ids", answers.top_ids.as_ref())?;
    check_dense(KERNEL, "their values", answers.top_logprobs.as_ref())
}
