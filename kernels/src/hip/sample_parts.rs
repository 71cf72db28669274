//! Answers to the questions of a step, where each rank has the logits of a part of the vocabulary.

use super::check::{check_most, check_size};
use super::device::HipDevice;
use super::launch::Launch;
use super::sample::{MAX_TOP, PICK_THREADS, Scratch, check};
use super::source::Source;
use crate::step::{AnswerArrays, Laid, SeatArrays, StageView};
use crate::{DType, DeviceError, Gather, InParts, Mat, MatMut, Stream, VocabPart};

static PARTS: Source = Source {
    name: "sample_parts/sample_parts.hip",
    text: include_str!("../../csrc/sample_parts/sample_parts.hip"),
};

const KERNEL: &str = "sample_parts";
/// Ids that a rank lists of each row. Sizes do not depend on rules, so all rows have room for them: 528 bytes a row and rank in all.
const LISTED: usize = 64;
/// Of a small part at most one id in so many.
const IDS_PER_LISTED: usize = 8;
/// Places in front of the list: `LISTED_FROM`.
const PLACES_BEFORE: usize = 2;
/// Where parts begin: at a multiple of it, so that masks and noise do.
const FIRST: usize = 64;

/// Ids that each rank lists; all of them are sorted at once.
fn listed(part: &VocabPart) -> usize {
    LISTED.min(MAX_TOP / part.ranks.max(1)).min(part.cols / IDS_PER_LISTED)
}

/// 32-bit words that a rank tells of `rows` rows.
fn words(rows: usize, part: &VocabPart) -> usize {
    rows * (PLACES_BEFORE + listed(part)) * 2
}

impl HipDevice {
    /// As `Kernels::samples_in_parts` says. Where less is told than there is, and some of it can be listed.
    pub(super) fn parts_answered(part: &VocabPart) -> InParts {
        match listed(part) {
            most if most > 0 && words(1, part) < part.cols => InParts::TopK(most),
            _ => InParts::Nothing,
        }
    }

    pub(super) fn answer_in_parts(
        &self,
        s: &Stream,
        (logits, part): (Mat<'_>, &VocabPart),
        (stage, laid): (&StageView<'_>, &Laid<'_>),
        seats: &mut SeatArrays<'_>,
        answers: &mut AnswerArrays<'_>,
        gather: &mut Gather<'_>,
    ) -> Result<(), DeviceError> {
        check((logits, part), laid, seats, answers)?;
        check_most(KERNEL, "end of the part", part.first + part.ids, part.vocab.max(part.first))?;
        let begins = if part.ids > 0 { part.first } else { 0 };
        check_size(KERNEL, "first id", begins, begins.next_multiple_of(FIRST))?;
        if Self::parts_answered(part) == InParts::Nothing {
            return Err(DeviceError::NoParts { device: self.arch().to_owned() });
        }
        let own = words(logits.rows(), part);
        let scratch = Scratch::new(self, s, logits, own * (1 + part.ranks) * 4)?;
        self.scan(s, (logits, part), (stage, laid), seats, &scratch)?;
        self.tell(s, (logits, part), (stage, laid), seats, &scratch)?;
        // SAFETY: the scratch has room for the words of this rank and, behind them, of all; nobody else knows it. What is brought in
        // one row takes no scratch of its own.
        let (told, all) = unsafe {
            let (told, all) = (scratch.rest, scratch.rest.add(own * 4));
            let columns = own * part.ranks;
            (
                Mat::from_raw(told, DType::I32, 1, own, own),
                MatMut::from_raw(all, DType::I32, 1, columns, columns),
            )
        };
        if !gather(told, all) {
            return Err(DeviceError::Peers);
        }
        // SAFETY: as above.
        let all = unsafe { scratch.rest.add(own * 4) };
        self.pick_of_all(s, (logits.rows(), part), (stage, laid), seats, answers, all)?;
        self.judge(s, logits.rows(), (stage, laid), seats, answers)
    }

    /// What this rank says about each row.
    fn tell(
        &self,
        s: &Stream,
        (logits, part): (Mat<'_>, &VocabPart),
        (stage, laid): (&StageView<'_>, &Laid<'_>),
        seats: &SeatArrays<'_>,
        scratch: &Scratch,
    ) -> Result<(), DeviceError> {
        let kernel = self.kernel(&PARTS, "part_tell", &[])?;
        let launch = Launch::new(kernel, (logits.rows() as u32, 1, 1), PICK_THREADS, 0)
            .overlaps_predecessor()
            .arg_ptr(scratch.rest)
            .arg_ptr(scratch.records)
            .arg_ptr(scratch.edited)
            .arg(logits)
            .arg(stage.bytes)
            .arg(laid.positions)
            .arg(seats.rules.as_ref())
            .u32(part.vocab as u32)
            .u32(part.first as u32)
            .u32((part.first + part.ids) as u32)
            .u32(logits.stride() as u32)
            .u32(scratch.edited_stride as u32)
            .u32(listed(part) as u32);
        // SAFETY: the scratch holds what the scan left, and room for what is told.
        unsafe { launch.go(self, s) }
    }

    /// The answers, out of what all ranks told.
    fn pick_of_all(
        &self,
        s: &Stream,
        (questions, part): (usize, &VocabPart),
        (stage, laid): (&StageView<'_>, &Laid<'_>),
        seats: &mut SeatArrays<'_>,
        answers: &mut AnswerArrays<'_>,
        all: *const u8,
    ) -> Result<(), DeviceError> {
        let kernel = self.kernel(&PARTS, "part_pick", &[])?;
        let launch = Launch::new(kernel, (questions as u32, 1, 1), PICK_THREADS, 0)
            .overlaps_predecessor()
            .out(&mut answers.answers)
            .out(&mut seats.newest)
            .out(&mut seats.history)
            .arg_ptr(all)
            .arg(stage.bytes)
            .arg(laid.positions)
            .arg(seats.rules.as_ref())
            .u32(part.vocab as u32)
            .u32(part.ranks as u32)
            .u32(listed(part) as u32)
            .u32(seats.history.cols() as u32);
        // SAFETY: answers have a row for each question; the host checked what it staged against the seats.
        unsafe { launch.go(self, s) }
    }
}
