//! GPU launches of vocab-parallel sampling, where each rank has the logits of a vocabulary shard.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DType, DeviceError, DeviceStream, MatMut, MatRef, check_at_most, check_size};

use super::sample::{MAX_TOP, PICK_THREADS, SampleScratch, ShardLogits, StagedStep, check};
use crate::gpu::GpuBackend;
use crate::step::{SamplerOutputArrays, SequenceSlotArrays};
use crate::{GpuKernel, VocabParallelSampling, VocabParallelSupport, VocabShard};

static VOCAB_PARALLEL: KernelSource =
    kernel_source!("sample_vocab_parallel/sample_vocab_parallel.hip");

const KERNEL: &str = "sample_vocab_parallel";
/// Maximum number of candidate tokens that a rank sends per row. Message sizes do not depend on sampling
/// parameters, so the message of every row has space for all candidates: 528 bytes per row and rank.
const CANDIDATES: usize = 64;
/// Minimum number of columns of the vocabulary shard per candidate token: in a small shard, at most one in
/// this many columns is sent as a candidate.
const IDS_PER_CANDIDATE: usize = 8;
/// Number of 64-bit words before the candidate list of a row; must match `LISTED_FROM` in
/// `csrc/sample_vocab_parallel`.
const CANDIDATES_AT: usize = 2;
/// Alignment of the first token id of a shard, so that no word of a grammar bitmask and no block of random
/// words belongs to two shards.
const SHARD_ALIGNMENT: usize = 64;

/// Returns the number of candidate tokens per rank and row. The number is limited, because one block sorts
/// the candidates of all ranks.
fn candidate_count(shard: &VocabShard) -> usize {
    CANDIDATES.min(MAX_TOP / shard.ranks.max(1)).min(shard.cols / IDS_PER_CANDIDATE)
}

/// Returns the number of 32-bit words that a rank sends for `rows` rows.
fn exchange_words(rows: usize, shard: &VocabShard) -> usize {
    rows * (CANDIDATES_AT + candidate_count(shard)) * 2
}

impl GpuBackend {
    /// Returns which rows can be sampled vocab-parallel: rows with top-k up to the number of candidates per
    /// rank, or no rows if the candidates take at least as many words as the logits of the shard.
    pub(crate) fn vocab_parallel_support_of(shard: &VocabShard) -> VocabParallelSupport {
        match candidate_count(shard) {
            top_k if top_k > 0 && exchange_words(1, shard) < shard.cols => {
                VocabParallelSupport::TopK(top_k)
            }
            _ => VocabParallelSupport::Unsupported,
        }
    }

    /// Launches the kernel that collects the candidate tokens of this rank for each row.
    fn collect_candidates(
        &self,
        s: &DeviceStream,
        rows: ShardLogits<'_>,
        step: StagedStep<'_>,
        seq_slots: &SequenceSlotArrays<'_>,
        scratch: &SampleScratch,
    ) -> Result<(), DeviceError> {
        let ShardLogits { logits, shard } = rows;
        let kernel = self.kernel(&VOCAB_PARALLEL, "vocab_shard_candidates", &[])?;
        let launch = KernelLaunch::new(kernel, [logits.rows() as u32, 1, 1], PICK_THREADS, 0)
            .overlaps_predecessor()
            .arg_ptr(scratch.rest)
            .arg_ptr(scratch.records)
            .arg_ptr(scratch.edited)
            .arg(logits);
        let launch = rows
            .args(step.args(launch, seq_slots), scratch.edited_stride)
            .u32(candidate_count(shard) as u32);
        // SAFETY: scratch memory has the results of the scan, and is large enough for the candidates.
        unsafe { launch.launch(self, s) }
    }

    /// Launches the kernel that samples the tokens from the candidates of all ranks.
    fn merge_candidates(
        &self,
        s: &DeviceStream,
        rows: ShardLogits<'_>,
        step: StagedStep<'_>,
        seq_slots: &mut SequenceSlotArrays<'_>,
        outputs: &mut SamplerOutputArrays<'_>,
        gathered_candidates: *const u8,
    ) -> Result<(), DeviceError> {
        let ShardLogits { logits, shard } = rows;
        let kernel = self.kernel(&VOCAB_PARALLEL, "vocab_shard_merge", &[])?;
        let launch = KernelLaunch::new(kernel, [logits.rows() as u32, 1, 1], PICK_THREADS, 0)
            .overlaps_predecessor()
            .out(&mut outputs.sampled)
            .out(&mut seq_slots.latest)
            .out(&mut seq_slots.history)
            .arg_ptr(gathered_candidates);
        let launch = step
            .args(launch, seq_slots)
            .u32(shard.vocab as u32)
            .u32(shard.ranks as u32)
            .u32(candidate_count(shard) as u32)
            .u32(seq_slots.history.cols() as u32);
        // SAFETY: the outputs have a row per logits row; the host checked the staged indices against the
        // sequence slots.
        unsafe { launch.launch(self, s) }
    }
}

impl GpuKernel for VocabParallelSampling<'_, '_, '_, '_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { logits, shard, stage, prepared, slots: seq_slots, outputs, gather } = self;
        let rows = ShardLogits { logits, shard };
        let step = StagedStep { stage, prepared };
        check(rows, prepared, seq_slots, outputs)?;
        check_at_most(
            KERNEL,
            "end of the shard",
            shard.first_id + shard.ids,
            shard.vocab.max(shard.first_id),
        )?;
        let first_id = if shard.ids > 0 { shard.first_id } else { 0 };
        check_size(KERNEL, "first id", first_id, first_id.next_multiple_of(SHARD_ALIGNMENT))?;
        if GpuBackend::vocab_parallel_support_of(shard) == VocabParallelSupport::Unsupported {
            return Err(DeviceError::VocabParallelUnsupported { device: gpu.arch().to_owned() });
        }
        let own_words = exchange_words(logits.rows(), shard);
        let scratch = SampleScratch::new(gpu, s, logits, own_words * (1 + shard.ranks) * 4)?;
        gpu.scan(s, rows, step, seq_slots, &scratch)?;
        gpu.collect_candidates(s, rows, step, seq_slots, &scratch)?;
        // SAFETY: scratch memory is large enough for the words of this rank, followed by those of all ranks,
        // and only this function uses them: the all-gather of one row takes no scratch memory.
        let (own_candidates, gathered_candidates) = unsafe {
            let gathered = scratch.rest.add(own_words * 4);
            let gathered_words = own_words * shard.ranks;
            (
                MatRef::from_raw(scratch.rest, DType::I32, 1, own_words, own_words),
                MatMut::from_raw(gathered, DType::I32, 1, gathered_words, gathered_words),
            )
        };
        if !gather(own_candidates, gathered_candidates) {
            return Err(DeviceError::PeerRanksFailed);
        }
        // SAFETY: the address is the range of all ranks in scratch memory, after the words of this rank.
        let gathered_candidates = unsafe { scratch.rest.add(own_words * 4) };
        gpu.merge_candidates(s, rows, step, seq_slots, outputs, gathered_candidates)?;
        gpu.verify_drafts(s, logits.rows(), step, seq_slots, outputs)
    }
}
