//! What a stage says becomes what a forward pass reads.

use super::check::{check_dense, check_dtype, check_least, check_size};
use super::device::HipDevice;
use super::launch::Launch;
use super::source::Source;
use crate::step::{SeatArrays, StageView, StepArrays};
use crate::{DType, DeviceError, Stream};

static PREPARE: Source =
    Source { name: "prepare/prepare.hip", text: include_str!("../../csrc/prepare/prepare.hip") };

const KERNEL: &str = "prepare";
const THREADS: usize = 256;
/// Tokens that one thread may lay out before a row is given more blocks.
const TOKENS_PER_THREAD: usize = 4;
/// Blocks of a row at most.
const MAX_PARTS: usize = 32;

impl HipDevice {
    pub(super) fn prepare_step(
        &self,
        s: &Stream,
        stage: &StageView<'_>,
        seats: &mut SeatArrays<'_>,
        step: &mut StepArrays<'_>,
        block_tokens: usize,
    ) -> Result<(), DeviceError> {
        check_step(stage, step)?;
        check_seats(seats)?;
        let blocks = stage.rows.max(1);
        let per_row = stage.tokens.div_ceil(blocks);
        let parts = per_row.div_ceil(THREADS * TOKENS_PER_THREAD).clamp(1, MAX_PARTS);
        let kernel = self.kernel(&PREPARE, "prepare_step", &[])?;
        let launch = Launch::new(kernel, (blocks as u32, parts as u32, 1), THREADS as u32, 0)
            .overlaps_predecessor()
            .out(&mut step.ids)
            .out(&mut step.positions)
            .out(&mut step.slots)
            .out(&mut step.cu_q)
            .out(&mut step.context_lens)
            .out(&mut step.row_seats)
            .out(&mut step.question_tokens)
            .out(&mut seats.tables)
            .out(&mut seats.history)
            .out(&mut seats.masks)
            .out(&mut seats.rules)
            .arg(seats.newest.as_ref())
            .arg(stage.bytes)
            .u32(stage.rows as u32)
            .u32(stage.tokens as u32)
            .u32(stage.questions as u32)
            .u32(seats.tables.cols() as u32)
            .u32(seats.history.cols() as u32)
            .u32(seats.masks.cols() as u32)
            .u32(block_tokens as u32);
        // SAFETY: the arrays hold what is laid out; the host checked what it staged against the seats.
        unsafe { launch.go(self, s) }
    }
}

fn check_step(stage: &StageView<'_>, step: &StepArrays<'_>) -> Result<(), DeviceError> {
    let least = |what, got, least| check_least(KERNEL, what, got, least);
    least("ids", step.ids.cols(), stage.tokens)?;
    least("positions", step.positions.cols(), stage.tokens)?;
    least("slots", step.slots.cols(), stage.tokens)?;
    least("cu_q", step.cu_q.cols(), stage.rows + 1)?;
    least("context_lens", step.context_lens.cols(), stage.rows)?;
    least("row_seats", step.row_seats.cols(), stage.rows)?;
    least("question_tokens", step.question_tokens.cols(), stage.questions)?;
    check_dtype(KERNEL, "slots", step.slots.dtype(), DType::I64)?;
    for x in [&step.ids, &step.positions, &step.cu_q, &step.context_lens, &step.row_seats] {
        check_dtype(KERNEL, "indices", x.dtype(), DType::I32)?;
    }
    check_dtype(KERNEL, "question_tokens", step.question_tokens.dtype(), DType::I32)
}

/// Refuses seat arrays whose rows are not as the kernels take them to be.
pub(super) fn check_seats(seats: &SeatArrays<'_>) -> Result<(), DeviceError> {
    const RULE_WORDS: usize = size_of::<crate::step::SeatRules>() / 4;
    const NEWEST_WORDS: usize = size_of::<crate::step::Newest>() / 4;
    check_least(KERNEL, "words of rules", seats.rules.cols(), RULE_WORDS)?;
    check_size(KERNEL, "words of a newest token", seats.newest.cols(), NEWEST_WORDS)?;
    for (what, x) in [
        ("newest", &seats.newest),
        ("tables", &seats.tables),
        ("history", &seats.history),
        ("masks", &seats.masks),
        ("rules", &seats.rules),
    ] {
        check_dtype(KERNEL, what, x.dtype(), DType::I32)?;
        check_dense(KERNEL, what, x.as_ref())?;
    }
    Ok(())
}
