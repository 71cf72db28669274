//! GPU launch of step preparation: computes the input arrays of the forward pass from the staged inputs of a
//! step.

use device::gpu::{KernelLaunch, KernelSource};
use device::{
    DType, DeviceError, DeviceStream, check_at_least, check_dense, check_dtype, check_size,
};

use crate::gpu::GpuBackend;
use crate::step::{RowMetadataField, SequenceSlotArrays, StagingBufferView, StepInputArrays};
use crate::{GpuKernel, StepPreparation};

static PREPARE: KernelSource = kernel_source!("prepare/prepare.hip");

const KERNEL: &str = "prepare";
const THREADS: usize = 256;
/// Number of tokens per thread above which several blocks prepare a row.
const TOKENS_PER_THREAD: usize = 4;
/// Maximum number of blocks that prepare one row.
const MAX_BLOCKS_PER_ROW: usize = 32;

impl GpuKernel for StepPreparation<'_, '_, '_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { stage, slots: seq_slots, step, block_tokens } = self;
        check_step(stage, step)?;
        check_sequence_slots(seq_slots)?;
        let groups = step.slots.rows();
        let seq_slot_count = seq_slots.slots_of_groups(groups)?;
        let blocks = stage.rows.max(1);
        let per_row = stage.tokens.div_ceil(blocks);
        let row_blocks = per_row.div_ceil(THREADS * TOKENS_PER_THREAD).clamp(1, MAX_BLOCKS_PER_ROW);
        let kernel = gpu.kernel(&PREPARE, "prepare_step", &[])?;
        let launch =
            KernelLaunch::new(kernel, [blocks as u32, row_blocks as u32, 1], THREADS as u32, 0)
                .overlaps_predecessor()
                .out(&mut step.ids)
                .out(&mut step.positions)
                .out(&mut step.slots)
                .out(&mut step.cu_q)
                .out(&mut step.context_lens)
                .out(&mut step.logits_indices)
                .out(&mut step.row_facts)
                .out(&mut seq_slots.tables)
                .out(&mut seq_slots.history)
                .out(&mut seq_slots.masks)
                .out(&mut seq_slots.params)
                .arg(seq_slots.latest.as_ref())
                .arg(stage.bytes)
                .u32(stage.rows as u32)
                .u32(stage.tokens as u32)
                .u32(stage.logits_rows as u32)
                .u32(seq_slots.tables.cols() as u32)
                .u32(seq_slots.history.cols() as u32)
                .u32(seq_slots.masks.cols() as u32)
                .u32(block_tokens as u32)
                .u32(step.row_facts.stride() as u32)
                .u32(groups as u32)
                .u32(seq_slot_count as u32)
                .u32(step.slots.stride() as u32);
        // SAFETY: the arrays are large enough for the step; the host checked the staged indices against the
        // sequence slots.
        unsafe { launch.launch(gpu, s) }
    }
}

fn check_step(
    stage: &StagingBufferView<'_>,
    step: &StepInputArrays<'_>,
) -> Result<(), DeviceError> {
    let check_columns = |what, got, min| check_at_least(KERNEL, what, got, min);
    check_columns("ids", step.ids.cols(), stage.tokens)?;
    check_columns("positions", step.positions.cols(), stage.tokens)?;
    check_columns("KV slots", step.slots.cols(), stage.tokens)?;
    check_columns("cu_q", step.cu_q.cols(), stage.rows + 1)?;
    check_columns("context_lens", step.context_lens.cols(), stage.rows)?;
    check_columns("logits indices", step.logits_indices.cols(), stage.logits_rows)?;
    check_columns("row facts", step.row_facts.rows(), RowMetadataField::COUNT)?;
    check_columns("columns of row facts", step.row_facts.cols(), stage.rows)?;
    check_dtype(KERNEL, "row facts", step.row_facts.dtype(), DType::I32)?;
    check_dtype(KERNEL, "KV slots", step.slots.dtype(), DType::I64)?;
    for x in [&step.ids, &step.positions, &step.cu_q, &step.context_lens] {
        check_dtype(KERNEL, "indices", x.dtype(), DType::I32)?;
    }
    check_dtype(KERNEL, "logits indices", step.logits_indices.dtype(), DType::I32)
}

/// Checks that the arrays of the sequence slots have the row sizes and types that the kernels expect.
pub(super) fn check_sequence_slots(seq_slots: &SequenceSlotArrays<'_>) -> Result<(), DeviceError> {
    const PARAM_WORDS: usize = size_of::<crate::step::SequenceSamplingParams>() / 4;
    check_at_least(KERNEL, "words of sampling parameters", seq_slots.params.cols(), PARAM_WORDS)?;
    check_size(
        KERNEL,
        "words of the latest token",
        seq_slots.latest.cols(),
        crate::step::LatestToken::WORDS,
    )?;
    for (what, x) in [
        ("latest token", &seq_slots.latest),
        ("block tables", &seq_slots.tables),
        ("history", &seq_slots.history),
        ("grammar bitmasks", &seq_slots.masks),
        ("sampling parameters", &seq_slots.params),
    ] {
        check_dtype(KERNEL, what, x.dtype(), DType::I32)?;
        check_dense(KERNEL, what, x.as_ref())?;
    }
    Ok(())
}
