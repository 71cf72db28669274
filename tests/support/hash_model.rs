//! A simulated executor built on `protocol` alone: it does what a `Batch` says, on hashes.
//!
//! Owns slots and seats, as a device does; never refcounts, never a policy. The next token is a hash
//! of the whole prefix **read back through the block table**, slot by slot, so an aliased, stale,
//! freed or misplaced block shows as a wrong token at once. Reads happen after the writes of all
//! rows of the step, as on a device. `Reading::Nothing` is the zero-time device for HTTP
//! benchmarks: the token is a hash of (key, position) and no slot is touched.
//!
//! A batch that no device could run (a hole in a table, an unknown seat) is a `Violation`.

#![allow(dead_code, reason = "each test binary uses a part")]

#[path = "hash_text.rs"]
pub(crate) mod text;

use protocol::{
    Batch, BlockId, Epoch, Input, MaskRow, RequestId, Row, RowError, RowOutput, StepId, StepOutput,
    StepTiming, Token,
};
use text::{EMPTY, POISON, Voice, avalanche, entry, fold};

/// Whether the next token depends on what the slots hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Write and read every slot.
    Slots,
    /// Touch no slot.
    Nothing,
}

/// Size of a simulated device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    /// KV blocks in the pool.
    pub(crate) blocks: u32,
    /// Positions per block.
    pub(crate) block_tokens: u32,
    /// Ids are drawn from `0 .. vocab`.
    pub(crate) vocab: Token,
    /// Most drafts made behind a sampled token.
    pub(crate) drafts: u8,
    /// Whether slots are used.
    pub(crate) reading: Reading,
}

/// A batch asked for something that no device could do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Violation(pub(crate) String);

/// A block that a row filled, for checkers that want to know what has really been computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Filled {
    /// Index of the row in its batch.
    pub(crate) row: u32,
    /// Position behind the block.
    pub(crate) end: u32,
    /// Context behind the block.
    pub(crate) context: u64,
}

/// Result of one row before it is known whether it fails.
type Outcome<T> = Result<T, Violation>;

/// Persistent state of one seat.
#[derive(Debug, Clone)]
struct SeatState {
    request: RequestId,
    epoch: u32,
    voice: Voice,
    table: Vec<BlockId>,
    /// The last sampled token, not yet in a slot, and the step that sampled it.
    last: Option<(Token, StepId)>,
    /// Position of `last`.
    next: u32,
    /// What may follow `last`; `None` = nothing was sampled in this epoch.
    drafts: Option<Vec<Token>>,
}

/// What a row forwards, once the seat has filled in what the host does not know.
struct Span {
    start: u32,
    ids: Vec<Token>,
}

/// The simulated device.
#[derive(Debug)]
pub(crate) struct HashModel {
    shape: Shape,
    slots: Vec<u64>,
    seats: Vec<Option<SeatState>>,
    filled: Vec<Filled>,
    moved: u64,
    /// What every request is answered with, whatever its prompt.
    pub(crate) script: Option<Vec<Token>>,
}

impl HashModel {
    /// A device whose slots have never been written.
    pub(crate) fn new(shape: Shape) -> Self {
        let slots = match shape.reading {
            Reading::Slots => vec![POISON; shape.blocks as usize * shape.block_tokens as usize],
            Reading::Nothing => Vec::new(),
        };
        Self { shape, slots, seats: Vec::new(), filled: Vec::new(), moved: 0, script: None }
    }

    /// Makes the content of a freed block unreadable. Call it in stream order.
    pub(crate) fn poison(&mut self, block: BlockId) {
        let size = self.shape.block_tokens as usize;
        let from = block.0 as usize * size;
        if let Some(slots) = self.slots.get_mut(from..from + size) {
            slots.fill(POISON);
        }
    }

    /// Blocks that the last step filled, failed rows and rejected drafts left out.
    pub(crate) fn filled(&self) -> &[Filled] {
        &self.filled
    }

    /// Rows of the last step that began behind their `start`: drafts of those under way were accepted.
    pub(crate) fn moved(&self) -> u64 {
        self.moved
    }

    /// Runs one step without masked rows.
    pub(crate) fn run(&mut self, batch: &Batch) -> Outcome<StepOutput> {
        self.run_with(batch, &[], |_| None)
    }

    /// Runs one step whose masked rows have these `masks`, and in which `fails` makes single rows fail, as NaN
    /// logits would: such a row leaves unreadable entries behind and emits nothing.
    pub(crate) fn run_with(
        &mut self,
        batch: &Batch,
        masks: &[MaskRow],
        fails: impl Fn(&Row) -> Option<RowError>,
    ) -> Outcome<StepOutput> {
        let mut spans = Vec::with_capacity(batch.rows.len());
        let mut rows = vec![RowOutput::default(); batch.rows.len()];
        self.filled.clear();
        self.moved = 0;
        for (index, (row, output)) in batch.rows.iter().zip(&mut rows).enumerate() {
            self.take_seat(row)?;
            let span = self.span(row)?;
            self.moved += u64::from(span.start > row.start);
            output.error = fails(row);
            if self.shape.reading == Reading::Slots {
                self.write(index as u32, row, &span, output)?;
            }
            spans.push(span);
        }
        for (index, ((row, span), output)) in
            (0..).zip(batch.rows.iter().zip(&spans).zip(&mut rows))
        {
            let found = masks.iter().find(|mask| mask.row == index);
            let mask = found.map(|mask| &mask.allowed[..]);
            if mask.is_some() != row.masked {
                return fail(row, format_args!("masked {}, mask {mask:?}", row.masked));
            }
            if found.is_some_and(|mask| mask.late) {
                output.error.get_or_insert(RowError::MaskLate);
            }
            match output.error {
                Some(_) => {
                    let drafts = self.shape.drafts;
                    self.seat_mut(row)?.lose(batch.step, span.start + row.len, drafts);
                }
                None if row.samples => self.sample(batch.step, (row, mask), span, output)?,
                None => {}
            }
        }
        // Entries of rejected drafts are rubbish until they are rewritten.
        self.filled.retain(|filled| {
            let (row, span) = (&batch.rows[filled.row as usize], &spans[filled.row as usize]);
            let accepted = u32::from(rows[filled.row as usize].accepted);
            filled.end <= span.start + row.len + accepted
        });
        let (timing, experts) = (StepTiming::default(), Vec::new());
        Ok(StepOutput { step: batch.step, epoch: batch.epoch, rows, timing, experts })
    }

    /// Starts a request's epoch in its seat, if this is its first row, and updates its block table.
    fn take_seat(&mut self, row: &Row) -> Outcome<()> {
        let index = row.seat.0 as usize;
        if index >= self.seats.len() {
            self.seats.resize_with(index + 1, || None);
        }
        if let Some(init) = &row.init {
            let (sampling, vocab) = (init.sampling.clone(), self.shape.vocab);
            let mut voice = Voice::new(vocab, sampling, init.key, init.prompt_len);
            voice.hear(&init.history);
            self.seats[index] = Some(SeatState {
                request: row.request,
                epoch: row.epoch,
                voice,
                table: Vec::new(),
                last: None,
                next: 0,
                drafts: None,
            });
        }
        let blocks = self.shape.blocks;
        let seat = self.seat_mut(row)?;
        for update in &row.tables {
            let from = update.from as usize;
            if update.group != 0 || from > seat.table.len() {
                return fail(row, format_args!("table update {update:?} leaves a hole"));
            }
            if update.blocks.iter().any(|b| b.0 >= blocks) {
                return fail(
                    row,
                    format_args!("table update {update:?} leaves the pool of {blocks}"),
                );
            }
            seat.table.truncate(from);
            seat.table.extend_from_slice(&update.blocks);
        }
        Ok(())
    }

    /// Resolves the input ids of a row: from the host, or from the seat.
    fn span(&mut self, row: &Row) -> Outcome<Span> {
        let seat = self.seat_mut(row)?;
        let (start, mut ids) = match (&row.input, seat.last) {
            (Input::Tokens(ids), _) if ids.len() == row.len as usize => (row.start, ids.to_vec()),
            (Input::SampledAt { step, .. }, Some((token, at))) if at == *step && row.len == 1 => {
                (seat.next, vec![token])
            }
            (input, last) => {
                return fail(
                    row,
                    format_args!("input {input:?} with seat {last:?}, len {}", row.len),
                );
            }
        };
        let slack = row.input.slack();
        if !(row.start..=row.start + slack).contains(&start) {
            return fail(row, format_args!("starts at {start}, its slack is {slack}"));
        }
        if row.drafts > 0 {
            let Some(drafts) = &seat.drafts else {
                return fail(row, format_args!("{} drafts of an idle seat", row.drafts));
            };
            ids.extend(drafts.iter().take(row.drafts.into()));
        }
        Ok(Span { start, ids })
    }

    /// Writes the entries of a row's ids and reports the prompt log-probabilities of the chunk.
    fn write(&mut self, index: u32, row: &Row, span: &Span, output: &mut RowOutput) -> Outcome<()> {
        let Self { shape, slots, seats, filled, .. } = self;
        let seat = seat_of(seats, row)?;
        let wanted = seat.voice.sampling.prompt_logprobs;
        let failed = output.error.is_some();
        let mut context = read(slots, &seat.table, shape, span.start, row)?;
        for (i, &id) in span.ids.iter().enumerate() {
            let position = span.start + i as u32;
            let value = entry(context, id);
            context = fold(context, value);
            let slot = slot(&seat.table, shape, position, row)?;
            slots[slot] = if failed { POISON } else { value };
            if (position + 1).is_multiple_of(shape.block_tokens) && !failed {
                filled.push(Filled { row: index, end: position + 1, context });
            }
            let of_prompt = position + 1 < seat.voice.prompt_len;
            if let (Some(top), true, false) = (wanted, of_prompt, failed) {
                let Some(next) = span.ids.get(i + 1).copied().or(row.next) else {
                    return fail(row, format_args!("prompt id {} is not named", position + 1));
                };
                output.prompt_logprobs.push(text::logprobs(context, next, top, shape.vocab));
            }
        }
        Ok(())
    }

    /// Samples behind a row, verifying its drafts, and makes drafts for the next one.
    fn sample(
        &mut self,
        step: StepId,
        (row, mask): (&Row, Option<&[u32]>),
        span: &Span,
        output: &mut RowOutput,
    ) -> Outcome<()> {
        let Self { shape, slots, seats, script, .. } = self;
        let seat = seat_of_mut(seats, row)?;
        let first = span.start + row.len; // Position of the first token emitted.
        let mut context = match shape.reading {
            Reading::Slots => read(slots, &seat.table, shape, first, row)?,
            Reading::Nothing => avalanche(seat.voice.key ^ avalanche(u64::from(first))),
        };
        let wanted = seat.voice.sampling.logprobs;
        output.drafted = (span.ids.len() - row.len as usize) as u8;
        for i in 0..=usize::from(row.drafts) {
            let position = first + i as u32;
            let said = position.saturating_sub(seat.voice.prompt_len) as usize;
            let scripted = script.as_ref().and_then(|script| script.get(said).copied());
            let scripted = scripted.filter(|&id| mask.is_none_or(|mask| text::allows(mask, id)));
            let Some(token) = scripted.or_else(|| seat.voice.next(context, position, mask)) else {
                *output = RowOutput { error: Some(RowError::AllMasked), ..RowOutput::default() };
                seat.lose(step, position, shape.drafts);
                return Ok(());
            };
            output.emitted.push(token);
            output.logprobs.extend(wanted.map(|n| text::logprobs(context, token, n, shape.vocab)));
            seat.voice.hear(&[token]);
            seat.last = Some((token, step));
            seat.next = position;
            if span.ids.get(row.len as usize + i) != Some(&token) {
                break;
            }
            output.accepted += 1;
            let slot = slot(&seat.table, shape, position, row)?;
            context = fold(context, slots.get(slot).copied().unwrap_or_default());
        }
        seat.draft(context, shape.drafts);
        Ok(())
    }

    /// The seat a row names, if it still belongs to the row's request and epoch.
    fn seat_mut(&mut self, row: &Row) -> Outcome<&mut SeatState> {
        seat_of_mut(&mut self.seats, row)
    }
}

impl SeatState {
    /// After a failed row: a step already in flight may still read this seat and gets rubbish.
    fn lose(&mut self, step: StepId, next: u32, drafts: u8) {
        self.last = Some((0, step));
        self.next = next;
        self.draft(POISON, drafts);
    }

    /// Guesses what follows: usually right, wrong often enough that rejections happen. Now and then fewer guesses than
    /// `most`, as of a drafter that finds nothing like what it has seen.
    fn draft(&mut self, mut context: u64, most: u8) {
        let mut drafts = self.drafts.take().unwrap_or_default();
        drafts.clear();
        let (mut token, mut voice) = (self.last.map_or(0, |(token, _)| token), self.voice.clone());
        let luck = avalanche(context ^ 2);
        let count = if luck.is_multiple_of(4) { luck % (u64::from(most) + 1) } else { most.into() };
        for i in 1..=count as u32 {
            context = fold(context, entry(context, token));
            let Some(mut guess) = voice.next(context, self.next + i, None) else { break };
            if avalanche(context ^ 1).is_multiple_of(3) {
                guess = (guess + 1) % voice.vocab;
            }
            voice.hear(&[guess]);
            drafts.push(guess);
            token = guess;
        }
        self.drafts = Some(drafts);
    }
}

/// Folds the entries of positions `[0, end)`, read slot by slot through the table.
fn read(slots: &[u64], table: &[BlockId], shape: &Shape, end: u32, row: &Row) -> Outcome<u64> {
    let size = shape.block_tokens as usize;
    let mut left = end as usize;
    let mut context = EMPTY;
    for block in table {
        if left == 0 {
            break;
        }
        let from = block.0 as usize * size;
        let here = left.min(size);
        context = slots[from..from + here].iter().fold(context, |c, &e| fold(c, e));
        left -= here;
    }
    if left > 0 {
        return fail(
            row,
            format_args!("reads {end} positions, table covers {}", end as usize - left),
        );
    }
    Ok(context)
}

/// The slot of a position.
fn slot(table: &[BlockId], shape: &Shape, position: u32, row: &Row) -> Outcome<usize> {
    let size = shape.block_tokens;
    match table.get((position / size) as usize) {
        Some(block) => Ok((block.0 * size + position % size) as usize),
        None => fail(row, format_args!("position {position} lies past a table of {}", table.len())),
    }
}

fn seat_of<'a>(seats: &'a [Option<SeatState>], row: &Row) -> Outcome<&'a SeatState> {
    match seats.get(row.seat.0 as usize).and_then(Option::as_ref) {
        Some(seat) if (seat.request, seat.epoch) == (row.request, row.epoch) => Ok(seat),
        other => fail(row, format_args!("seat holds {:?}", other.map(|s| (s.request, s.epoch)))),
    }
}

fn seat_of_mut<'a>(seats: &'a mut [Option<SeatState>], row: &Row) -> Outcome<&'a mut SeatState> {
    seat_of(seats, row)?;
    seats
        .get_mut(row.seat.0 as usize)
        .and_then(Option::as_mut)
        .ok_or_else(|| Violation("seat vanished".into()))
}

fn fail<T>(row: &Row, text: std::fmt::Arguments<'_>) -> Outcome<T> {
    let Row { request, epoch, seat, start, len, .. } = row;
    Err(Violation(format!(
        "request {}.{epoch} seat {} [{start}, {start} + {len}): {text}",
        request.0, seat.0
    )))
}

/// An executor thread around a zero-time device: the start-up handshake, then one reply per batch.
pub(crate) mod thread {
    use super::{Epoch, HashModel, Shape};
    use protocol::link::{InProcess, Link, LinkError};
    use protocol::{
        Batch, FromExecutor, Hello, KvGroup, KvKind, KvSpec, MaskRow, Memory, PROTOCOL_VERSION,
        Pace, Profiled, Rank, Ready, ToExecutor, WeightsDigest,
    };
    use std::collections::VecDeque;
    use std::time::Duration;

    /// Both directions of a link; masks are taken ahead of the orders between them.
    pub(crate) struct Orders {
        link: InProcess<FromExecutor, ToExecutor>,
        kept: VecDeque<ToExecutor>,
    }

    impl Orders {
        pub(crate) fn new(link: InProcess<FromExecutor, ToExecutor>) -> Self {
            Self { link, kept: VecDeque::new() }
        }

        pub(crate) fn send(&mut self, message: FromExecutor) -> Result<(), LinkError> {
            self.link.send(message)
        }

        pub(crate) fn next(&mut self) -> Result<Option<ToExecutor>, LinkError> {
            match self.kept.pop_front() {
                Some(order) => Ok(Some(order)),
                None => self.link.recv(Duration::from_hours(1)),
            }
        }

        /// Waits for the masks of a batch.
        pub(crate) fn masks(&mut self, batch: &Batch) -> Result<Vec<MaskRow>, LinkError> {
            let wanted = batch.rows.iter().filter(|row| row.masked).count();
            let mut rows = Vec::new();
            let mut others = VecDeque::new();
            while rows.len() < wanted {
                match self.next()? {
                    Some(ToExecutor::Mask(mask)) if mask.step == batch.step => {
                        rows.extend(mask.rows);
                    }
                    Some(ToExecutor::Mask(mask)) if mask.step < batch.step => {}
                    other => others.extend(other),
                }
            }
            others.append(&mut self.kept);
            self.kept = others;
            Ok(rows)
        }
    }

    /// Serves a link until `Shutdown` or until the other end is gone.
    ///
    /// Errors: `LinkError::Closed` if the scheduler goes away without `Shutdown`.
    pub(crate) fn serve(
        shape: Shape,
        link: InProcess<FromExecutor, ToExecutor>,
    ) -> Result<(), LinkError> {
        let mut link = Orders::new(link);
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: shape.block_tokens, groups: vec![group] };
        let blocks = shape.blocks;
        let device = "hash model".to_owned();
        let (build, manifest) = (String::new(), 0);
        let hello = Hello {
            version: PROTOCOL_VERSION,
            rank: Rank(0),
            epoch: Epoch(0),
            device,
            build,
            manifest,
        };
        link.send(FromExecutor::Hello(hello))?;
        link.send(FromExecutor::Loaded(WeightsDigest::default()))?;
        link.send(FromExecutor::Memory(Memory { spec, blocks, pace: Pace::default() }))?;
        let mut model = HashModel::new(shape);
        loop {
            match link.next()? {
                None | Some(ToExecutor::Mask(_)) => {}
                Some(ToExecutor::SizeKv { blocks }) => {
                    model = HashModel::new(Shape { blocks, ..shape });
                    link.send(FromExecutor::Ready(Ready { blocks, graph_rows: Vec::new() }))?;
                }
                Some(ToExecutor::Batch(batch)) => {
                    let masks = link.masks(&batch)?;
                    let reply = match model.run_with(&batch, &masks, |_| None) {
                        Ok(output) => FromExecutor::StepOutput(output),
                        Err(violation) => {
                            FromExecutor::Fault { step: Some(batch.step), text: violation.0 }
                        }
                    };
                    link.send(reply)?;
                }
                Some(ToExecutor::Profile { .. }) => {
                    link.send(FromExecutor::Profiled(Profiled::Stopped(None)))?;
                }
                Some(ToExecutor::Shutdown) => return Ok(()),
            }
        }
    }
}
