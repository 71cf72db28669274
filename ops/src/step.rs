//! The arrays of a step on the device: staged by one copy, laid out by `prepare`, read by the forward
//! pass, answered by `sample`. All have their full size and their address from the start.
//!
//! T tokens, R rows, Q questions.

use kernels::step::{Answer, AnswerArrays, Judge, Laid, Stage, StageView, StepArrays};
use kernels::{DType, Gather, InFlight, Mat, Pinned, RowBounds, VocabPart};

use crate::{BatchView, OpError, Ops, Seats, Tensor};

/// Words of an `Answer`.
const ANSWER_WORDS: usize = size_of::<Answer>() / 4;

/// Bounds of all steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSize {
    /// Tokens per step.
    pub tokens: usize,
    /// Rows per step.
    pub rows: usize,
    /// Questions per step.
    pub questions: usize,
    /// Likeliest ids an answer can list.
    pub top: usize,
    /// Bytes of a stage.
    pub stage_bytes: usize,
    /// Token positions per KV block.
    pub block_tokens: usize,
    /// Who says which drafts stand.
    pub judge: Judge,
}

/// What one step lays out: what its stage says, or more where a captured graph is larger.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Tokens.
    pub tokens: usize,
    /// Rows.
    pub rows: usize,
    /// Questions.
    pub questions: usize,
    /// Bounds of the rows; for a captured graph those of every step that it will serve.
    pub bounds: RowBounds,
}

/// Device memory of a step's inputs and answers.
#[derive(Debug)]
pub struct StepBuffers {
    pub(crate) size: StepSize,
    pub(crate) stage: Tensor,     // i32 [1, bytes / 4]
    pub(crate) ids: Tensor,       // i32 [1, T]
    pub(crate) positions: Tensor, // i32 [1, T]
    slots: Tensor,                // i64 [1, T]
    cu_q: Tensor,                 // i32 [1, R + 1]
    context_lens: Tensor,         // i32 [1, R]
    row_seats: Tensor,            // i32 [1, R]
    question_tokens: Tensor,      // i32 [1, Q]
    answers: Tensor,              // i32 [Q, 4]
    top_ids: Tensor,              // i32 [Q, top]
    top_logprobs: Tensor,         // f32 [Q, top]
}

impl StepBuffers {
    /// Memory for steps up to `size`.
    pub fn new(ops: &Ops, size: StepSize) -> Result<Self, OpError> {
        let words = |n: usize| ops.zeros(DType::I32, &[1, n]);
        Ok(Self {
            size,
            stage: words(size.stage_bytes.div_ceil(4))?,
            ids: words(size.tokens)?,
            positions: words(size.tokens)?,
            slots: ops.zeros(DType::I64, &[1, size.tokens])?,
            cu_q: words(size.rows + 1)?,
            context_lens: words(size.rows)?,
            row_seats: words(size.rows)?,
            question_tokens: words(size.questions)?,
            answers: ops.zeros(DType::I32, &[size.questions, ANSWER_WORDS])?,
            top_ids: ops.zeros(DType::I32, &[size.questions, size.top])?,
            top_logprobs: ops.zeros(DType::F32, &[size.questions, size.top])?,
        })
    }

    /// Starts the copy of a stage. `memory` holds at least `stage_bytes` and comes back when it is over.
    pub fn upload(
        &mut self,
        ops: &Ops,
        stage: &Stage,
        mut memory: Pinned,
    ) -> Result<InFlight, OpError> {
        let bytes = stage.write(memory.bytes_mut());
        Ok(ops.device.start_upload(&ops.stream, self.stage.buffer_mut()?, memory, bytes)?)
    }

    /// Takes over what the uploaded stage says about seats and lays out the step.
    pub fn prepare(
        &mut self,
        ops: &Ops,
        seats: &mut Seats,
        shape: StepShape,
    ) -> Result<(), OpError> {
        let stage = view(&self.stage, shape)?;
        let mut step = StepArrays {
            ids: self.ids.mat_mut()?,
            positions: self.positions.mat_mut()?,
            slots: self.slots.mat_mut()?,
            cu_q: self.cu_q.mat_mut()?,
            context_lens: self.context_lens.mat_mut()?,
            row_seats: self.row_seats.mat_mut()?,
            question_tokens: self.question_tokens.mat_mut()?,
        };
        let (s, block_tokens) = (&ops.stream, self.size.block_tokens);
        ops.device.prepare(s, &stage, &mut seats.arrays()?, &mut step, block_tokens)?;
        Ok(())
    }

    /// What a forward pass over a prepared step reads: its batch, and the ids `[T]`.
    pub fn view(&self, seats: &Seats, shape: StepShape) -> Result<(BatchView, Tensor), OpError> {
        let StepShape { tokens, rows, .. } = shape;
        let tables = &seats.tables;
        let batch = BatchView {
            positions: self.positions.narrow(&[tokens])?,
            slots: self.slots.narrow(&[tokens])?,
            cu_q: self.cu_q.narrow(&[rows + 1])?,
            context_lens: self.context_lens.narrow(&[rows])?,
            block_tables: tables.narrow(tables.shape())?,
            table_rows: Some(self.row_seats.narrow(&[rows])?),
            bounds: shape.bounds,
        };
        Ok((batch, self.ids.narrow(&[tokens])?))
    }

    /// Tokens behind the first `n` questions, i32 `[n]`: whose logits are wanted.
    pub fn question_tokens(&self, n: usize) -> Result<Tensor, OpError> {
        self.question_tokens.narrow(&[n])
    }

    /// Answers the first `n` questions out of `logits` f32 `[n, V]`.
    pub fn sample(&mut self, ops: &Ops, seats: &mut Seats, logits: &Tensor) -> Result<(), OpError> {
        let (stage, laid, mut answers) = self.asked(logits.rows())?;
        let (s, logits, asked) = (&ops.stream, logits.mat()?, (&stage, &laid));
        ops.device.sample_rows(s, logits, asked, &mut seats.arrays()?, &mut answers)?;
        Ok(())
    }

    /// The same where each of several ranks has the logits of a part of the vocabulary, f32 `[n, part.cols]`; `gather`
    /// tells all of them what they need of each other. Questions are such as `samples_in_parts` of the device says.
    pub fn sample_parts(
        &mut self,
        ops: &Ops,
        seats: &mut Seats,
        (logits, part): (&Tensor, &VocabPart),
        gather: &mut Gather<'_>,
    ) -> Result<(), OpError> {
        let (stage, laid, mut answers) = self.asked(logits.rows())?;
        let (s, logits, mut seats) = (&ops.stream, (logits.mat()?, part), seats.arrays()?);
        ops.device.sample_parts(s, logits, (&stage, &laid), &mut seats, &mut answers, gather)?;
        Ok(())
    }

    /// The first `n` questions, the step they are about, and the places of their answers.
    fn asked(&mut self, n: usize) -> Result<(StageView<'_>, Laid<'_>, AnswerArrays<'_>), OpError> {
        let stage = view(&self.stage, StepShape { questions: n, ..StepShape::default() })?;
        let (ids, positions) = (self.ids.mat()?, self.positions.mat()?);
        let laid = Laid { ids, positions, judge: self.size.judge };
        let answers = AnswerArrays {
            answers: self.answers.mat_mut()?,
            top_ids: self.top_ids.mat_mut()?,
            top_logprobs: self.top_logprobs.mat_mut()?,
        };
        Ok((stage, laid, answers))
    }

    /// The stage of a step that has been prepared, and the positions of its tokens, i32 `[1, T]`.
    pub(crate) fn staged(&self) -> Result<(Mat<'_>, Mat<'_>), OpError> {
        Ok((self.stage.mat()?, self.positions.mat()?))
    }

    /// Host memory for the answers of a step.
    pub fn answer_memory(&self, ops: &Ops) -> Result<AnswerMemory, OpError> {
        let pinned = |tensor: &Tensor| ops.device.alloc_pinned(tensor.len() * 4);
        Ok(AnswerMemory {
            answers: pinned(&self.answers)?,
            top_ids: pinned(&self.top_ids)?,
            top_logprobs: pinned(&self.top_logprobs)?,
        })
    }

    /// Starts the copy of the first `questions` answers to the host; their lists too, if any asked (`tops`).
    pub fn download(
        &self,
        ops: &Ops,
        memory: AnswerMemory,
        (questions, tops): (usize, bool),
    ) -> Result<AnswersInFlight, OpError> {
        let start = |from: &Tensor, to: Pinned, rows: usize| {
            let bytes = rows * from.cols() * 4;
            ops.device.start_download(&ops.stream, from.buffer(), to, bytes).map(Part::Moving)
        };
        let list = |from: &Tensor, to: Pinned| {
            if tops { start(from, to, questions) } else { Ok(Part::Idle(to)) }
        };
        let top_ids = list(&self.top_ids, memory.top_ids)?;
        let top_logprobs = list(&self.top_logprobs, memory.top_logprobs)?;
        let answers = start(&self.answers, memory.answers, questions)?;
        let sizes = Sizes { questions, top: self.size.top };
        Ok(AnswersInFlight { sizes, answers, top_ids, top_logprobs })
    }
}

/// Host memory for the answers of one step.
#[derive(Debug)]
pub struct AnswerMemory {
    answers: Pinned,
    top_ids: Pinned,
    top_logprobs: Pinned,
}

/// Answers on their way to the host.
#[derive(Debug)]
pub struct AnswersInFlight {
    sizes: Sizes,
    answers: Part,
    top_ids: Part,
    top_logprobs: Part,
}

/// What there is of each part.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    questions: usize,
    /// Places of a list.
    top: usize,
}

/// Memory of a part of the answers: in use only where somebody wants it.
#[derive(Debug)]
enum Part {
    Idle(Pinned),
    Moving(InFlight),
}

impl Part {
    fn wait(self) -> Result<Pinned, OpError> {
        match self {
            Self::Idle(memory) => Ok(memory),
            Self::Moving(copy) => Ok(copy.wait()?),
        }
    }
}

/// Answers on the host.
#[derive(Debug)]
pub struct Answers {
    sizes: Sizes,
    memory: AnswerMemory,
}

impl AnswersInFlight {
    /// Waits for them.
    pub fn wait(self) -> Result<Answers, OpError> {
        let (top_ids, top_logprobs) = (self.top_ids.wait()?, self.top_logprobs.wait()?);
        let memory = AnswerMemory { answers: self.answers.wait()?, top_ids, top_logprobs };
        Ok(Answers { sizes: self.sizes, memory })
    }
}

impl Answers {
    /// The answers, in the order of the questions.
    pub fn iter(&self) -> impl Iterator<Item = Answer> + '_ {
        let bytes = &self.memory.answers.bytes()[..self.sizes.questions * size_of::<Answer>()];
        bytes.as_chunks::<16>().0.iter().map(|raw| {
            let word = |i: usize| [raw[4 * i], raw[4 * i + 1], raw[4 * i + 2], raw[4 * i + 3]];
            Answer {
                token: i32::from_ne_bytes(word(0)),
                status: u32::from_ne_bytes(word(1)),
                logprob: f32::from_ne_bytes(word(2)),
                rank: u32::from_ne_bytes(word(3)),
            }
        })
    }

    /// The first `n` of the likeliest ids listed for question `q`, with their log-probabilities.
    pub fn top(&self, q: usize, n: usize) -> impl Iterator<Item = (u32, f32)> + '_ {
        let words = |memory: &'_ Pinned| {
            let top = self.sizes.top;
            let row = &memory.bytes()[q * top * 4..][..n.min(top) * 4];
            row.as_chunks::<4>().0.to_vec()
        };
        let (ids, values) = (words(&self.memory.top_ids), words(&self.memory.top_logprobs));
        let pair = |(id, value)| (u32::from_ne_bytes(id), f32::from_ne_bytes(value));
        ids.into_iter().zip(values).map(pair)
    }

    /// The memory, for another step.
    #[must_use]
    pub fn into_memory(self) -> AnswerMemory {
        self.memory
    }
}

/// A stage tensor as kernels read it.
fn view(stage: &Tensor, shape: StepShape) -> Result<StageView<'_>, OpError> {
    let StepShape { tokens, rows, questions, .. } = shape;
    Ok(StageView { bytes: stage.mat()?, rows, tokens, questions })
}
