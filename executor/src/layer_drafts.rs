//! Guessing tokens by the model's own draft layer (DeepSeek-V3, arXiv 2412.19437, section 2.2), on the host's memory.
//!
//! What the layer keeps of position `p` is made of token `p` and of the hidden state before it. It is the same bits
//! whatever comes behind, so chunks, recomputed rows and those behind a prefix hit keep what an undisturbed run does. The
//! state before a row is the newest of its seat's; behind a prefix hit it is the one at the end of the last block found,
//! which is kept for each block. Guesses are chained: for the second one the layer's own output stands for a hidden state.
//! What that leaves in the pool nobody sees: the tokens that turn out right are forwarded before anyone asks behind them.

#[cfg(test)]
mod tests;

use crate::{BatchError, ExecutorError, step::Engine};
use models::{Exchange, Forward};
use ops::{BatchInputs, BatchView, KvPool, Tensor};
use protocol::{Input, Row, Token};

/// Rows of a pass: the logits of so many, of all tokens, are in memory at a time.
const ROWS: usize = 64;

/// Makes drafts for rows.
pub(crate) struct LayerDrafts {
    most: usize,
    block_tokens: usize,
    /// Channels of a hidden state.
    hidden: usize,
    seats: Vec<Carried>,
    /// The hidden state at the end of each block, `[blocks, H]`.
    edges: Vec<f32>,
    /// `[H]`
    zeros: Vec<f32>,
}

/// What a request's next row begins with.
#[derive(Default)]
struct Carried {
    table: Vec<i32>,
    /// Position of the first of `states`.
    from: usize,
    /// Hidden states of the newest tokens, drafts among them, and of the one before, if there is one: a token whose mask
    /// came late is forwarded again. `[n, H]`
    states: Vec<f32>,
}

/// A row whose next tokens are guessed.
struct Guessed<'a> {
    row: usize,
    table: &'a [i32],
    /// Where its newest token stands, and which it is.
    position: usize,
    token: Token,
    most: usize,
    /// The hidden state before it, `[H]`.
    before: Vec<f32>,
}

impl LayerDrafts {
    /// For rows of at most `most` drafts on so many seats, and a pool of so many blocks of so many tokens.
    pub(crate) fn new(
        most: u8,
        hidden: usize,
        seats: usize,
        (blocks, block_tokens): (usize, usize),
    ) -> Self {
        let edges = vec![0.0; blocks * hidden];
        let seats = (0..seats).map(|_| Carried::default()).collect();
        let zeros = vec![0.0; hidden];
        Self { most: most.into(), block_tokens, hidden, seats, edges, zeros }
    }

    /// Takes over what rows whose seats exist say of their tables.
    pub(crate) fn hear(&mut self, rows: &[Row]) {
        for row in rows {
            let seat = &mut self.seats[row.seat.0 as usize];
            if row.init.is_some() {
                *seat = Carried::default();
            }
            for update in &row.tables {
                seat.table.truncate(update.from as usize);
                seat.table.extend(update.blocks.iter().map(|block| block.0 as i32));
            }
        }
    }

    /// Drafts of each row that has been heard of, by as many passes of the layer as any row has drafts.
    pub(crate) fn draft(
        &self,
        engine: &Engine,
        kv: &KvPool,
        rows: &[Row],
    ) -> Result<Vec<Vec<Token>>, ExecutorError> {
        let mut drafts = vec![Vec::new(); rows.len()];
        let guessed = |(i, row): (usize, &Row)| self.guessed(i, row, engine.part.vocab);
        let mut guessed: Vec<Guessed<'_>> = rows.iter().enumerate().filter_map(guessed).collect();
        for pass in 0..self.most {
            guessed.retain(|of| pass < of.most && of.position / self.block_tokens < of.table.len());
            if guessed.is_empty() {
                break;
            }
            for some in guessed.chunks_mut(ROWS) {
                let found = self.pass(engine, kv, some)?;
                for (of, (token, state)) in some.iter_mut().zip(found) {
                    drafts[of.row].push(token);
                    (of.position, of.token, of.before) = (of.position + 1, token, state);
                }
            }
        }
        Ok(drafts)
    }

    /// What to begin with on a row that is to verify drafts: one of a single token that the host knows.
    fn guessed(&self, i: usize, row: &Row, vocab: usize) -> Option<Guessed<'_>> {
        let Input::Tokens(ids) = &row.input else { return None };
        let &[token] = &ids[..] else { return None };
        let known = row.len == 1 && row.drafts > 0 && row.start > 0 && (token as usize) < vocab;
        let before = known.then(|| self.before(row).ok()).flatten()?.to_vec();
        let (table, position) = (&self.seats[row.seat.0 as usize].table[..], row.start as usize);
        Some(Guessed { row: i, table, position, token, most: row.drafts.into(), before })
    }

    /// One pass of the layer over the newest token of each: the likeliest next one, and the state behind it.
    fn pass(
        &self,
        engine: &Engine,
        kv: &KvPool,
        guessed: &[Guessed<'_>],
    ) -> Result<Vec<(Token, Vec<f32>)>, ExecutorError> {
        let ops = &engine.ops;
        let batch = BatchView::new(ops, &self.inputs(guessed))?;
        let ids: Vec<i32> = guessed.iter().map(|of| of.token as i32).collect();
        let before: Vec<f32> = guessed.iter().flat_map(|of| of.before.iter().copied()).collect();
        let before = ops.floats(&before, ops.dtype(), &[guessed.len(), self.hidden])?;
        let f = forward(engine, kv, &batch);
        let hidden = engine.model.draft(&f, &ops.ids(&ids)?, &before)?; // [n, H]
        let logits = engine.model.logits(&f, &hidden)?; // [n, V]
        let (states, logits) = (ops.read_f32(&hidden)?, ops.read_f32(&logits)?);
        let each = states.chunks(self.hidden).zip(logits.chunks(engine.part.vocab));
        Ok(each.map(|(state, logits)| (likeliest(logits), state.to_vec())).collect())
    }

    fn inputs(&self, guessed: &[Guessed<'_>]) -> BatchInputs {
        let width = guessed.iter().map(|of| of.table.len()).max().unwrap_or(0);
        let mut inputs = BatchInputs { cu_q: vec![0], ..BatchInputs::default() };
        for (i, of) in (1..).zip(guessed) {
            let (block, within) =
                (of.table[of.position / self.block_tokens], of.position % self.block_tokens);
            inputs.positions.push(of.position as i32);
            inputs.slots.push(i64::from(block) * self.block_tokens as i64 + within as i64);
            inputs.cu_q.push(i);
            inputs.context_lens.push(of.position as i32 + 1);
            inputs.block_tables.extend(of.table);
            inputs.block_tables.resize(i as usize * width, -1);
        }
        inputs
    }

    /// Keeps what later drafts see of the tokens of a step, `ids [T]`, and what its rows' next ones begin with. `hidden [T, H]`
    /// are the states behind the step; a row's `tokens` are its own and its drafts.
    pub(crate) fn keep(
        &mut self,
        engine: &Engine,
        (kv, batch, ids): (&KvPool, &BatchView, &Tensor),
        rows: &[(&Row, usize)],
        hidden: &Tensor,
    ) -> Result<(), ExecutorError> {
        let (ops, width) = (&engine.ops, self.hidden);
        let states = ops.read_f32(hidden)?;
        let mut before = Vec::with_capacity(states.len());
        let mut first = 0;
        for &(row, tokens) in rows {
            before.extend_from_slice(self.before(row)?);
            before.extend_from_slice(&states[first * width..(first + tokens - 1) * width]);
            first += tokens;
        }
        let before = ops.floats(&before, ops.dtype(), &[first, width])?;
        engine.model.keep_for_drafts(&forward(engine, kv, batch), ids, &before)?;
        let mut rest = &states[..];
        for &(row, tokens) in rows {
            let own;
            (own, rest) = rest.split_at(tokens * width);
            self.carry(row, own)?;
        }
        Ok(())
    }

    /// The hidden state before a row; zeros before the first token, which nobody sees.
    fn before(&self, row: &Row) -> Result<&[f32], BatchError> {
        let seat = &self.seats[row.seat.0 as usize];
        let (start, width) = (row.start as usize, self.hidden);
        let at = |i: usize| i * width..(i + 1) * width;
        if let Some(state) = start.checked_sub(seat.from + 1).and_then(|i| seat.states.get(at(i))) {
            return Ok(state);
        }
        let edge = start.checked_sub(1).filter(|_| start.is_multiple_of(self.block_tokens));
        let block = match edge {
            None if start == 0 => return Ok(&self.zeros),
            None => None,
            Some(last) => seat.table.get(last / self.block_tokens),
        };
        let state = block.and_then(|&block| self.edges.get(at(block as usize)));
        state.ok_or(BatchError::Midway { request: row.request, position: row.start })
    }

    /// Notes the states of a row's tokens, `own [tokens, H]`.
    fn carry(&mut self, row: &Row, own: &[f32]) -> Result<(), BatchError> {
        let (width, tokens) = (self.hidden, self.block_tokens);
        let (start, last) = (row.start as usize, row.len as usize - 1);
        let held = match last {
            0 if start == 0 => Vec::new(),
            0 => self.before(row)?.to_vec(),
            _ => own[(last - 1) * width..last * width].to_vec(),
        };
        let seat = &mut self.seats[row.seat.0 as usize];
        seat.from = start + last - usize::from(!held.is_empty());
        seat.states = held;
        seat.states.extend_from_slice(&own[last * width..]);
        for (position, state) in (row.start as usize..).zip(own.chunks(width)) {
            if (position + 1).is_multiple_of(tokens) {
                let block = seat.table[position / tokens] as usize;
                self.edges[block * width..][..width].copy_from_slice(state);
            }
        }
        Ok(())
    }
}

/// A pass of the draft layer. Its experts are counted nowhere, and it is not watched.
fn forward<'a>(engine: &'a Engine, kv: &'a KvPool, batch: &'a BatchView) -> Forward<'a> {
    let Engine { ops, tp, dp, .. } = engine;
    let (dp_rows, exchange, asked, load, probe) = (0, Exchange::Gather, None, None, None);
    Forward { ops, tp, dp, dp_rows, exchange, kv, batch, asked, load, probe }
}

/// The lowest id with the largest logit.
fn likeliest(logits: &[f32]) -> Token {
    let larger = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).fold(0, larger) as Token
}
