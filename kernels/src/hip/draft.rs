//! Around a model's draft layer: its passes are laid out, hidden states kept, drafts chosen and entered.

use super::check::{check_dense, check_dtype, check_least, check_size};
use super::device::HipDevice;
use super::launch::Launch;
use super::module::Function;
use super::source::Source;
use crate::step::{DraftPass, DraftStates, PassArrays};
use crate::{DType, DeviceError, Gather, Mat, MatMut, Stream, VocabPart};

static DRAFT: Source =
    Source { name: "draft/draft.hip", text: include_str!("../../csrc/draft/draft.hip") };

const KERNEL: &str = "draft";
const THREADS: u32 = 256;
/// Threads that look through a row of logits.
const ARGMAX_THREADS: u32 = 1024;
/// Words that a rank tells of each row: a place in the order of logits.
const TOLD: usize = 2;
/// Blocks of all rows together, at least: a prompt's states are copied by many.
const MANY_BLOCKS: usize = 128;

impl HipDevice {
    fn draft_kernel(&self, name: &'static str) -> Result<Function, DeviceError> {
        self.kernel(&DRAFT, name, &[])
    }

    pub(super) fn lay_out_pass(
        &self,
        s: &Stream,
        stage: Mat<'_>,
        to: &mut PassArrays<'_>,
        pass: &DraftPass<'_>,
    ) -> Result<(), DeviceError> {
        let rows = pass.rows;
        check_pass(to, pass)?;
        let grid = (rows.div_ceil(THREADS as usize) as u32, 1, 1);
        let launch = Launch::new(self.draft_kernel("draft_rows")?, grid, THREADS, 0)
            .overlaps_predecessor()
            .out(&mut to.ids)
            .out(&mut to.positions)
            .out(&mut to.slots)
            .out(&mut to.cu_q)
            .out(&mut to.context_lens)
            .out(&mut to.row_seats)
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
        // SAFETY: the arrays hold so many rows; the host checked what it staged.
        unsafe { launch.go(self, s) }
    }

    pub(super) fn states_before(
        &self,
        s: &Stream,
        (stage, positions, rows): (Mat<'_>, Mat<'_>, usize),
        mut y: MatMut<'_>,
        (hidden, states): (Option<Mat<'_>>, &DraftStates<'_>),
    ) -> Result<(), DeviceError> {
        let bytes = check_states(y.as_ref(), states)?;
        check_dtype(KERNEL, "positions", positions.dtype(), DType::I32)?;
        match hidden {
            Some(hidden) => {
                check_states(hidden, states)?;
                check_least(KERNEL, "tokens", y.rows(), hidden.rows())?;
            }
            None => check_least(KERNEL, "rows", y.rows(), rows)?,
        }
        let parts = if hidden.is_some() { parts(rows, y.rows()) } else { 1 };
        let grid = (rows as u32, parts, 1);
        let launch = Launch::new(self.draft_kernel("draft_before")?, grid, THREADS, 0)
            .overlaps_predecessor()
            .out(&mut y)
            .arg_or_null(hidden)
            .arg(states.held.as_ref())
            .arg(states.edges.as_ref())
            .arg(states.firsts.as_ref())
            .arg(positions)
            .arg(stage)
            .u32(u32::from(hidden.is_none()))
            .u32(states.depth as u32)
            .u32(bytes);
        // SAFETY: rows and tokens fit what is written; the host checked which seats and blocks it staged.
        unsafe { launch.go(self, s) }
    }

    pub(super) fn carry_states(
        &self,
        s: &Stream,
        (stage, positions): (Mat<'_>, Mat<'_>),
        states: &mut DraftStates<'_>,
        (hidden, rows): (Mat<'_>, usize),
        (tables, block_tokens): (Mat<'_>, usize),
    ) -> Result<(), DeviceError> {
        let bytes = check_states(hidden, states)?;
        check_dtype(KERNEL, "tables", tables.dtype(), DType::I32)?;
        check_dtype(KERNEL, "positions", positions.dtype(), DType::I32)?;
        let (grid, depth) = ((rows as u32, parts(rows, hidden.rows()), 1), states.depth as u32);
        let launch = Launch::new(self.draft_kernel("draft_carry")?, grid, THREADS, 0)
            .overlaps_predecessor()
            .out(&mut states.held)
            .out(&mut states.edges)
            .out(&mut states.firsts)
            .arg(hidden)
            .arg(positions)
            .arg(tables)
            .arg(stage)
            .u32(depth)
            .u32(bytes)
            .u32(tables.stride() as u32)
            .u32(block_tokens as u32);
        // SAFETY: as above; a seat has room for `depth` states, of which a row leaves no more.
        unsafe { launch.go(self, s) }
    }

    pub(super) fn choose_drafts(
        &self,
        s: &Stream,
        mut drafts: MatMut<'_>,
        (pass, first): (usize, usize),
        logits: Mat<'_>,
    ) -> Result<(), DeviceError> {
        let to = drafts_at(&mut drafts, (pass, first), logits)?;
        let grid = (logits.rows() as u32, 1, 1);
        let launch = Launch::new(self.draft_kernel("draft_argmax")?, grid, ARGMAX_THREADS, 0)
            .overlaps_predecessor()
            .arg_ptr(to)
            .arg(logits)
            .u32(logits.cols() as u32)
            .u32(logits.stride() as u32);
        // SAFETY: a draft for each row of logits, whose sizes are told.
        unsafe { launch.go(self, s) }
    }

    /// The same of a rank's part of the logits, together with those who have the others.
    pub(super) fn choose_drafts_of_parts(
        &self,
        s: &Stream,
        mut drafts: MatMut<'_>,
        place: (usize, usize),
        (logits, part): (Mat<'_>, &VocabPart),
        gather: &mut Gather<'_>,
    ) -> Result<(), DeviceError> {
        let to = drafts_at(&mut drafts, place, logits)?;
        check_least(KERNEL, "columns of logits", logits.cols(), part.ids)?;
        let rows = logits.rows();
        let (words, of_all) = (rows * TOLD, rows * TOLD * part.ranks);
        let told = self.scratch(s, (words + of_all) * size_of::<u32>())?;
        // SAFETY: behind the words of this rank, in the same scratch memory.
        let all = unsafe { told.add(words * size_of::<u32>()) };
        let launch =
            Launch::new(self.draft_kernel("draft_tell")?, (rows as u32, 1, 1), ARGMAX_THREADS, 0)
                .overlaps_predecessor()
                .arg_ptr(told)
                .arg(logits)
                .u32(part.first as u32)
                .u32(part.ids as u32)
                .u32(logits.stride() as u32);
        // SAFETY: two words for each row of logits, whose sizes are told.
        unsafe { launch.go(self, s)? };
        // SAFETY: the scratch has room for both; nobody else knows it, and what is brought in one row takes no scratch of its own.
        let (own, of_all) = unsafe {
            (
                Mat::from_raw(told, DType::I32, 1, words, words),
                MatMut::from_raw(all, DType::I32, 1, of_all, of_all),
            )
        };
        if !gather(own, of_all) {
            return Err(DeviceError::Peers);
        }
        let grid = ((rows as u32).div_ceil(THREADS), 1, 1);
        let launch = Launch::new(self.draft_kernel("draft_pick")?, grid, THREADS, 0)
            .overlaps_predecessor()
            .arg_ptr(to)
            .arg_ptr(all)
            .u32(rows as u32)
            .u32(part.ranks as u32);
        // SAFETY: as above.
        unsafe { launch.go(self, s) }
    }

    pub(super) fn name_drafts(
        &self,
        s: &Stream,
        mut drafts: MatMut<'_>,
        (pass, rows): (usize, usize),
        names: Mat<'_>,
    ) -> Result<(), DeviceError> {
        for x in [drafts.dtype(), names.dtype()] {
            check_dtype(KERNEL, "names", x, DType::I32)?;
        }
        check_least(KERNEL, "passes", drafts.rows(), pass + 1)?;
        check_least(KERNEL, "rows", drafts.cols(), rows)?;
        // SAFETY: inside the matrix, whose sizes were just checked.
        let first = unsafe { drafts.as_mut_ptr().add(pass * drafts.stride() * size_of::<i32>()) };
        let grid = (rows.div_ceil(THREADS as usize) as u32, 1, 1);
        let launch = Launch::new(self.draft_kernel("draft_name")?, grid, THREADS, 0)
            .overlaps_predecessor()
            .arg_ptr(first)
            .arg(names)
            .u32(rows as u32);
        // SAFETY: drafts are ids of logits, of which there are as many as names.
        unsafe { launch.go(self, s) }
    }

    pub(super) fn place_drafts(
        &self,
        s: &Stream,
        (stage, positions, rows): (Mat<'_>, Mat<'_>, usize),
        (mut ids, mut history): (MatMut<'_>, MatMut<'_>),
        drafts: Mat<'_>,
    ) -> Result<(), DeviceError> {
        check_least(KERNEL, "rows", drafts.cols(), rows)?;
        check_dense(KERNEL, "history", history.as_ref())?;
        for x in [ids.dtype(), history.dtype(), drafts.dtype(), positions.dtype()] {
            check_dtype(KERNEL, "ids", x, DType::I32)?;
        }
        let longest = history.cols() as u32;
        let grid = (rows.div_ceil(THREADS as usize) as u32, 1, 1);
        let launch = Launch::new(self.draft_kernel("draft_place")?, grid, THREADS, 0)
            .overlaps_predecessor()
            .out(&mut ids)
            .out(&mut history)
            .arg(positions)
            .arg(drafts)
            .arg(stage)
            .u32(rows as u32)
            .u32(drafts.stride() as u32)
            .u32(longest);
        // SAFETY: the host staged tokens of the step and seats that exist.
        unsafe { launch.go(self, s) }
    }
}

/// Blocks of a row.
fn parts(rows: usize, tokens: usize) -> u32 {
    let most = MANY_BLOCKS.div_ceil(rows.max(1));
    tokens.div_ceil(rows.max(1)).clamp(1, most) as u32
}

/// Refuses states of another shape than those of `x [n, H]`; returns the bytes of one.
fn check_states(x: Mat<'_>, states: &DraftStates<'_>) -> Result<u32, DeviceError> {
    for of in [states.held.as_ref(), states.edges.as_ref(), x] {
        check_dtype(KERNEL, "states", of.dtype(), x.dtype())?;
        check_size(KERNEL, "channels", of.cols(), x.cols())?;
        check_dense(KERNEL, "states", of)?;
    }
    check_dtype(KERNEL, "firsts", states.firsts.dtype(), DType::I32)?;
    Ok((x.cols() * x.dtype().bytes()) as u32)
}

fn check_pass(to: &PassArrays<'_>, pass: &DraftPass<'_>) -> Result<(), DeviceError> {
    let rows = pass.rows;
    check_least(KERNEL, "slots", to.slots.cols(), rows)?;
    check_dtype(KERNEL, "slots", to.slots.dtype(), DType::I64)?;
    check_least(KERNEL, "cu_q", to.cu_q.cols(), rows + 1)?;
    check_least(KERNEL, "drafts", pass.drafts.cols(), rows)?;
    check_least(KERNEL, "passes", pass.drafts.rows(), pass.pass)?;
    for x in [&to.ids, &to.positions, &to.context_lens, &to.row_seats] {
        check_least(KERNEL, "rows", x.cols(), rows)?;
        check_dtype(KERNEL, "indices", x.dtype(), DType::I32)?;
    }
    for x in [pass.ids, pass.positions, pass.drafts, pass.tables] {
        check_dtype(KERNEL, "indices", x.dtype(), DType::I32)?;
    }
    check_dtype(KERNEL, "cu_q", to.cu_q.dtype(), DType::I32)
}

/// Where the drafts of so many rows of logits go.
fn drafts_at(
    drafts: &mut MatMut<'_>,
    (pass, first): (usize, usize),
    logits: Mat<'_>,
) -> Result<*mut u8, DeviceError> {
    check_dtype(KERNEL, "logits", logits.dtype(), DType::F32)?;
    check_dtype(KERNEL, "drafts", drafts.dtype(), DType::I32)?;
    check_least(KERNEL, "passes", drafts.rows(), pass + 1)?;
    check_least(KERNEL, "rows", drafts.cols(), first + logits.rows())?;
    let at = (pass * drafts.stride() + first) * size_of::<i32>();
    // SAFETY: inside the matrix, whose sizes were just checked.
    Ok(unsafe { drafts.as_mut_ptr().add(at) })
}
