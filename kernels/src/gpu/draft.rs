//! GPU launches of the ops before and after the forward passes of a draft model: inputs of the passes,
//! storage of hidden states, argmax and insertion of draft tokens.

use device::gpu::{KernelFunction, KernelLaunch, KernelSource};
use device::{
    DType, DeviceError, DeviceStream, MatMut, MatRef, check_at_least, check_dense, check_dtype,
    check_size,
};

use crate::gpu::GpuBackend;
use crate::step::{DraftHiddenStates, DraftPassArgs, DraftPassArrays};
use crate::{
    DraftArgmax, DraftHiddenStateGather, DraftHiddenStateWrite, DraftIdTranslation, DraftInsertion,
    DraftPassPreparation, GpuKernel, VocabParallelDraftArgmax,
};

static DRAFT: KernelSource = kernel_source!("draft/draft.hip");

const KERNEL: &str = "draft";
const THREADS: u32 = 256;
/// Number of threads per logits row of the argmax kernels.
const ARGMAX_THREADS: u32 = 1024;
/// Number of 32-bit words that a rank sends per logits row in `VocabParallelDraftArgmax`: the upper and the
/// lower word of the sort key of its largest logit. The upper word is computed from the logit, the lower word
/// from the token id.
const CANDIDATE_WORDS: usize = 2;
/// Target number of thread blocks for a copy of hidden states: with fewer rows, several thread blocks copy
/// one row.
const COPY_BLOCKS_TARGET: usize = 128;

impl GpuBackend {
    fn draft_kernel(&self, name: &'static str) -> Result<KernelFunction, DeviceError> {
        self.kernel(&DRAFT, name, &[])
    }
}

impl GpuKernel for DraftInsertion<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { stage, positions, rows, mut ids, mut history, drafts } = self;
        check_at_least(KERNEL, "rows", drafts.cols(), rows)?;
        check_dense(KERNEL, "history", history.as_ref())?;
        for x in [ids.dtype(), history.dtype(), drafts.dtype(), positions.dtype()] {
            check_dtype(KERNEL, "ids", x, DType::I32)?;
        }
        let longest = history.cols() as u32;
        let grid = [rows.div_ceil(THREADS as usize) as u32, 1, 1];
        let launch = KernelLaunch::new(gpu.draft_kernel("insert_drafts")?, grid, THREADS, 0)
            .overlaps_predecessor()
            .out(&mut ids)
            .out(&mut history)
            .arg(positions)
            .arg(drafts)
            .arg(stage)
            .u32(rows as u32)
            .u32(drafts.stride() as u32)
            .u32(longest);
        // SAFETY: the shapes were checked; the host staged valid token indices and sequence slots.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for DraftIdTranslation<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { mut drafts, pass, count: rows, ids: id_map } = self;
        for x in [drafts.dtype(), id_map.dtype()] {
            check_dtype(KERNEL, "id map", x, DType::I32)?;
        }
        check_at_least(KERNEL, "passes", drafts.rows(), pass + 1)?;
        check_at_least(KERNEL, "rows", drafts.cols(), rows)?;
        // SAFETY: the address is inside the matrix, whose sizes were checked above.
        let first = unsafe { drafts.as_mut_ptr().add(pass * drafts.stride() * size_of::<i32>()) };
        let grid = [rows.div_ceil(THREADS as usize) as u32, 1, 1];
        let launch = KernelLaunch::new(gpu.draft_kernel("map_draft_ids")?, grid, THREADS, 0)
            .overlaps_predecessor()
            .arg_ptr(first)
            .arg(id_map)
            .u32(rows as u32);
        // SAFETY: draft token ids are columns of the draft logits, and the id map has one entry per column.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for VocabParallelDraftArgmax<'_, '_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { mut drafts, pass, first, logits, shard, gather } = self;
        let out = drafts_at(&mut drafts, pass, first, logits)?;
        check_at_least(KERNEL, "columns of logits", logits.cols(), shard.ids)?;
        let rows = logits.rows();
        let (words, gathered_words) =
            (rows * CANDIDATE_WORDS, rows * CANDIDATE_WORDS * shard.ranks);
        let own_candidates = gpu.scratch(s, (words + gathered_words) * size_of::<u32>())?;
        // SAFETY: the address is in the same scratch allocation, after the words of this rank.
        let gathered_candidates = unsafe { own_candidates.add(words * size_of::<u32>()) };
        let launch = KernelLaunch::new(
            gpu.draft_kernel("draft_shard_candidates")?,
            [rows as u32, 1, 1],
            ARGMAX_THREADS,
            0,
        )
        .overlaps_predecessor()
        .arg_ptr(own_candidates)
        .arg(logits)
        .u32(shard.first_id as u32)
        .u32(shard.ids as u32)
        .u32(logits.stride() as u32);
        // SAFETY: the output has two words per logits row, and the kernel gets the sizes of the logits.
        unsafe { launch.launch(gpu, s)? };
        // SAFETY: the scratch memory is large enough for both ranges, and only this function uses it: the
        // all-gather of one row takes no scratch memory.
        let (own, gathered) = unsafe {
            (
                MatRef::from_raw(own_candidates, DType::I32, 1, words, words),
                MatMut::from_raw(
                    gathered_candidates,
                    DType::I32,
                    1,
                    gathered_words,
                    gathered_words,
                ),
            )
        };
        if !gather(own, gathered) {
            return Err(DeviceError::PeerRanksFailed);
        }
        let grid = [(rows as u32).div_ceil(THREADS), 1, 1];
        let launch = KernelLaunch::new(gpu.draft_kernel("draft_shard_merge")?, grid, THREADS, 0)
            .overlaps_predecessor()
            .arg_ptr(out)
            .arg_ptr(gathered_candidates)
            .u32(rows as u32)
            .u32(shard.ranks as u32);
        // SAFETY: `drafts_at` checked that the output has an entry for every row; the words of all ranks are
        // in scratch memory.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for DraftArgmax<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { mut drafts, pass, first, logits } = self;
        let out = drafts_at(&mut drafts, pass, first, logits)?;
        let grid = [logits.rows() as u32, 1, 1];
        let launch = KernelLaunch::new(gpu.draft_kernel("draft_argmax")?, grid, ARGMAX_THREADS, 0)
            .overlaps_predecessor()
            .arg_ptr(out)
            .arg(logits)
            .u32(logits.cols() as u32)
            .u32(logits.stride() as u32);
        // SAFETY: `drafts_at` checked that the output has an entry for every logits row; the kernel gets the
        // sizes of the logits.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for DraftHiddenStateWrite<'_, '_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { stage, positions, states, hidden, rows, tables, block_tokens } = self;
        let bytes = check_states(hidden, states)?;
        check_dtype(KERNEL, "tables", tables.dtype(), DType::I32)?;
        check_dtype(KERNEL, "positions", positions.dtype(), DType::I32)?;
        let (grid, states_per_slot) =
            ([rows as u32, blocks_per_row(rows, hidden.rows()), 1], states.states_per_slot as u32);
        let launch = KernelLaunch::new(gpu.draft_kernel("store_draft_states")?, grid, THREADS, 0)
            .overlaps_predecessor()
            .out(&mut states.slot_states)
            .out(&mut states.boundary_states)
            .out(&mut states.first_positions)
            .arg(hidden)
            .arg(positions)
            .arg(tables)
            .arg(stage)
            .u32(states_per_slot)
            .u32(bytes)
            .u32(tables.stride() as u32)
            .u32(block_tokens as u32);
        // SAFETY: the shapes were checked and the host checked the staged indices; a sequence slot has
        // `states_per_slot` states, and a row stores at most `states_per_slot`.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for DraftHiddenStateGather<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { stage, positions, rows, mut y, hidden, states } = self;
        let bytes = check_states(y.as_ref(), states)?;
        check_dtype(KERNEL, "positions", positions.dtype(), DType::I32)?;
        match hidden {
            Some(hidden) => {
                check_states(hidden, states)?;
                check_at_least(KERNEL, "tokens", y.rows(), hidden.rows())?;
            }
            None => check_at_least(KERNEL, "rows", y.rows(), rows)?,
        }
        let row_blocks = if hidden.is_some() { blocks_per_row(rows, y.rows()) } else { 1 };
        let grid = [rows as u32, row_blocks, 1];
        let launch = KernelLaunch::new(gpu.draft_kernel("gather_draft_inputs")?, grid, THREADS, 0)
            .overlaps_predecessor()
            .out(&mut y)
            .arg_or_null(hidden)
            .arg(states.slot_states.as_ref())
            .arg(states.boundary_states.as_ref())
            .arg(states.first_positions.as_ref())
            .arg(positions)
            .arg(stage)
            .u32(u32::from(hidden.is_none()))
            .u32(states.states_per_slot as u32)
            .u32(bytes);
        // SAFETY: the output has a row for every row or token; the host checked the staged sequence slots and
        // blocks.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for DraftPassPreparation<'_, '_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { stage, arrays, pass } = self;
        let rows = pass.rows;
        check_pass(arrays, pass)?;
        let grid = [rows.div_ceil(THREADS as usize) as u32, 1, 1];
        let launch = KernelLaunch::new(gpu.draft_kernel("prepare_draft_pass")?, grid, THREADS, 0)
            .overlaps_predecessor()
            .out(&mut arrays.ids)
            .out(&mut arrays.positions)
            .out(&mut arrays.slots)
            .out(&mut arrays.cu_q)
            .out(&mut arrays.context_lens)
            .out(&mut arrays.row_seq_slots)
            .arg(pass.ids)
            .arg(pass.positions)
            .arg(pass.drafts)
            .arg(pass.tables)
            .arg(stage)
            .u32(rows as u32)
            .u32(pass.pass as u32)
            .u32(pass.drafts.stride() as u32)
            .u32(pass.tables.stride() as u32)
            .u32(pass.block_tokens as u32);
        // SAFETY: the arrays have an entry for each of `rows` rows; the host checked the staged indices.
        unsafe { launch.launch(gpu, s) }
    }
}

/// Returns the number of thread blocks per row for a copy of hidden states.
fn blocks_per_row(rows: usize, tokens: usize) -> u32 {
    let max_blocks = COPY_BLOCKS_TARGET.div_ceil(rows.max(1));
    tokens.div_ceil(rows.max(1)).clamp(1, max_blocks) as u32
}

/// Checks that the stored states have the width and type of `x [rows, hidden_size]`; returns the size of one
/// state in bytes.
fn check_states(x: MatRef<'_>, states: &DraftHiddenStates<'_>) -> Result<u32, DeviceError> {
    for mat in [states.slot_states.as_ref(), states.boundary_states.as_ref(), x] {
        check_dtype(KERNEL, "states", mat.dtype(), x.dtype())?;
        check_size(KERNEL, "channels", mat.cols(), x.cols())?;
        check_dense(KERNEL, "states", mat)?;
    }
    check_dtype(KERNEL, "first positions", states.first_positions.dtype(), DType::I32)?;
    Ok((x.cols() * x.dtype().bytes()) as u32)
}

fn check_pass(arrays: &DraftPassArrays<'_>, pass: &DraftPassArgs<'_>) -> Result<(), DeviceError> {
    let rows = pass.rows;
    check_at_least(KERNEL, "slots", arrays.slots.cols(), rows)?;
    check_dtype(KERNEL, "slots", arrays.slots.dtype(), DType::I64)?;
    check_at_least(KERNEL, "cu_q", arrays.cu_q.cols(), rows + 1)?;
    check_at_least(KERNEL, "drafts", pass.drafts.cols(), rows)?;
    check_at_least(KERNEL, "passes", pass.drafts.rows(), pass.pass)?;
    for x in [&arrays.ids, &arrays.positions, &arrays.context_lens, &arrays.row_seq_slots] {
        check_at_least(KERNEL, "rows", x.cols(), rows)?;
        check_dtype(KERNEL, "indices", x.dtype(), DType::I32)?;
    }
    for x in [pass.ids, pass.positions, pass.drafts, pass.tables] {
        check_dtype(KERNEL, "indices", x.dtype(), DType::I32)?;
    }
    check_dtype(KERNEL, "cu_q", arrays.cu_q.dtype(), DType::I32)
}

/// Returns the address of row `pass`, column `first` of `drafts`, after checking that each row of `logits`
/// has a column in `drafts`.
fn drafts_at(
    drafts: &mut MatMut<'_>,
    pass: usize,
    first: usize,
    logits: MatRef<'_>,
) -> Result<*mut u8, DeviceError> {
    check_dtype(KERNEL, "logits", logits.dtype(), DType::F32)?;
    check_dtype(KERNEL, "drafts", drafts.dtype(), DType::I32)?;
    check_at_least(KERNEL, "passes", drafts.rows(), pass + 1)?;
    check_at_least(KERNEL, "rows", drafts.cols(), first + logits.rows())?;
    let at = (pass * drafts.stride() + first) * size_of::<i32>();
    // SAFETY: the address is inside the matrix, whose sizes were checked above.
    Ok(unsafe { drafts.as_mut_ptr().add(at) })
}
