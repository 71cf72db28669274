//! Vocab-parallel sampling: each rank has the logits of a vocabulary shard.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DType, DeviceError, DeviceStream, MatMut, MatRef, check_at_most, check_size};

use super::sample::{MAX_TOP, PICK_THREADS, SampleScratch, check};
use crate::gpu::GpuBackend;
use crate::step::{PreparedStep, SamplerOutputArrays, SequenceSlotArrays, StageView};
use crate::{GpuKernel, VocabParallelSampling, VocabParallelSupport, VocabShard};

static VOCAB_PARALLEL: KernelSource =
    kernel_source!("sample_vocab_parallel/sample_vocab_parallel.hip");

const KERNEL: &str = "sample_vocab_parallel";
/// Maximum candidate ids that a rank sends per row. Message sizes do not depend on sampling parameters, so
/// every row has room for all candidates: 528 bytes per row and rank.
const CANDIDATES: usize = 64;
/// For small shards, minimum vocabulary ids per candidate.
const IDS_PER_CANDIDATE: usize = 8;
/// 64-bit words before the candidate list; must match `LISTED_FROM`.
const CANDIDATES_AT: usize = 2;
/// Alignment of the first id of a shard, so that words of grammar bitmasks and blocks of noise are not split.
const SHARD_ALIGNMENT: usize = 64;

/// Returns the number of candidate ids per rank; the candidates of all ranks are sorted together.
fn candidate_count(part: &VocabShard) -> usize {
    CANDIDATES.min(MAX_TOP / part.ranks.max(1)).min(part.cols / IDS_PER_CANDIDATE)
}

/// Returns the number of 32-bit words that a rank sends for `rows` rows.
fn exchange_words(rows: usize, part: &VocabShard) -> usize {
    rows * (CANDIDATES_AT + candidate_count(part)) * 2
}

impl GpuBackend {
    /// Returns the support of a shard: top-k candidates, if they are fewer words than the logits of the
    /// shard.
    pub(crate) fn vocab_parallel_support_of(part: &VocabShard) -> VocabParallelSupport {
        match candidate_count(part) {
            most if most > 0 && exchange_words(1, part) < part.cols => {
                VocabParallelSupport::TopK(most)
            }
            _ => VocabParallelSupport::Unsupported,
        }
    }

    /// Collects the candidates of this rank for each row.
    fn collect_candidates(
        &self,
        s: &DeviceStream,
        (logits, part): (MatRef<'_>, &VocabShard),
        (stage, laid): (&StageView<'_>, &PreparedStep<'_>),
        seats: &SequenceSlotArrays<'_>,
        scratch: &SampleScratch,
    ) -> Result<(), DeviceError> {
        let kernel = self.kernel(&VOCAB_PARALLEL, "vocab_shard_candidates", &[])?;
        let launch = KernelLaunch::new(kernel, (logits.rows() as u32, 1, 1), PICK_THREADS, 0)
            .overlaps_predecessor()
            .arg_ptr(scratch.rest)
            .arg_ptr(scratch.records)
            .arg_ptr(scratch.edited)
            .arg(logits)
            .arg(stage.bytes)
            .arg(laid.positions)
            .arg(seats.params.as_ref())
            .u32(part.vocab as u32)
            .u32(part.first_id as u32)
            .u32((part.first_id + part.ids) as u32)
            .u32(logits.stride() as u32)
            .u32(scratch.edited_stride as u32)
            .u32(candidate_count(part) as u32);
        // SAFETY: scratch memory has the results of the scan and room for the candidates.
        unsafe { launch.launch(self, s) }
    }

    /// Samples the tokens from the candidates of all ranks.
    fn merge_candidates(
        &self,
        s: &DeviceStream,
        (questions, part): (usize, &VocabShard),
        (stage, laid): (&StageView<'_>, &PreparedStep<'_>),
        seats: &mut SequenceSlotArrays<'_>,
        answers: &mut SamplerOutputArrays<'_>,
        all: *const u8,
    ) -> Result<(), DeviceError> {
        let kernel = self.kernel(&VOCAB_PARALLEL, "vocab_shard_merge", &[])?;
        let launch = KernelLaunch::new(kernel, (questions as u32, 1, 1), PICK_THREADS, 0)
            .overlaps_predecessor()
            .out(&mut answers.sampled)
            .out(&mut seats.latest)
            .out(&mut seats.history)
            .arg_ptr(all)
            .arg(stage.bytes)
            .arg(laid.positions)
            .arg(seats.params.as_ref())
            .u32(part.vocab as u32)
            .u32(part.ranks as u32)
            .u32(candidate_count(part) as u32)
            .u32(seats.history.cols() as u32);
        // SAFETY: the outputs have a row per logits row; the host checked the staged indices against the
        // sequence slots.
        unsafe { launch.launch(self, s) }
    }
}

impl GpuKernel for VocabParallelSampling<'_, '_, '_, '_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self {
            logits,
            shard: part,
            stage,
            prepared: laid,
            slots: seats,
            outputs: answers,
            gather,
        } = self;
        check((logits, part), laid, seats, answers)?;
        check_at_most(
            KERNEL,
            "end of the part",
            part.first_id + part.ids,
            part.vocab.max(part.first_id),
        )?;
        let begins = if part.ids > 0 { part.first_id } else { 0 };
        check_size(KERNEL, "first id", begins, begins.next_multiple_of(SHARD_ALIGNMENT))?;
        if GpuBackend::vocab_parallel_support_of(part) == VocabParallelSupport::Unsupported {
            return Err(DeviceError::VocabParallelUnsupported { device: gpu.arch().to_owned() });
        }
        let own = exchange_words(logits.rows(), part);
        let scratch = SampleScratch::new(gpu, s, logits, own * (1 + part.ranks) * 4)?;
        gpu.scan(s, (logits, part), (stage, laid), seats, &scratch)?;
        gpu.collect_candidates(s, (logits, part), (stage, laid), seats, &scratch)?;
        // SAFETY: scratch memory has room for the words of this rank, followed by those of all ranks, and
        // only this function uses them. Gathering one row takes no scratch memory.
        let (told, all) = unsafe {
            let (told, all) = (scratch.rest, scratch.rest.add(own * 4));
            let columns = own * part.ranks;
            (
                MatRef::from_raw(told, DType::I32, 1, own, own),
                MatMut::from_raw(all, DType::I32, 1, columns, columns),
            )
        };
        if !gather(told, all) {
            return Err(DeviceError::PeerRanksFailed);
        }
        // SAFETY: the address is the range of all ranks in scratch memory, after the words of this rank.
        let all = unsafe { scratch.rest.add(own * 4) };
        gpu.merge_candidates(s, (logits.rows(), part), (stage, laid), seats, answers, all)?;
        gpu.verify_drafts(s, logits.rows(), (stage, laid), seats, answers)
    }
}
