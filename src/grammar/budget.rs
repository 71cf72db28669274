//! A budget of reasoning: once an output has reasoned for so many tokens, the mark that ends its reasoning is forced,
//! token by token.
//!
//! Follows committed tokens and nothing else, as sessions do. Whoever brings a budget brings the [`Reader`] that tells
//! reasoning from the rest, so that budget and reply never disagree about where reasoning ends.

use protocol::Token;
use std::sync::Arc;

/// Tokens beyond its budget that an output may take to finish a character, where a grammar reads it: one of broken
/// characters leaves every grammar. No character has more bytes than these and one.
const PATIENCE_TOKENS: u32 = 3;

/// Where an output stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// Reasoning may yet begin.
    Before,
    /// Inside reasoning.
    Inside {
        /// No character is unfinished.
        whole: bool,
    },
    /// Behind it, or there will be none.
    Behind,
}

/// Reads one output.
pub trait Reader: Send {
    /// Takes the next token.
    fn push(&mut self, token: Token);

    /// Where the output stands behind the tokens so far.
    fn stands(&self) -> Reading;
}

/// Makes the reader of one output.
pub type NewReader = Arc<dyn Fn() -> Box<dyn Reader> + Send + Sync>;

/// How long an output may reason, and how it is stopped.
#[derive(Clone)]
pub struct Budget {
    /// Reasoning tokens at most.
    pub tokens: u32,
    /// Ids that end the reasoning; never empty.
    pub mark: Arc<[Token]>,
    /// Ids below this exist: the model's, which may be more than the tokenizer's.
    pub vocab_size: u32,
    /// Who tells where the output stands.
    pub reader: NewReader,
}

impl std::fmt::Debug for Budget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { tokens, mark, .. } = self;
        f.debug_struct("Budget").field("tokens", tokens).field("mark", mark).finish_non_exhaustive()
    }
}

/// One output under its budget.
pub(super) struct Meter {
    budget: Budget,
    reader: Box<dyn Reader>,
    /// Whether the grammar behind the reasoning reads it too.
    patient: bool,
    reasoned: u32,
    /// The newest reasoning tokens, fewer than the mark has.
    newest: Vec<Token>,
    /// Tokens of the mark that are there, once the rest of it is forced.
    forced: Option<usize>,
    over: bool,
}

impl Meter {
    /// An output before its first token; `patient`: it must not be cut within a character.
    pub(super) fn new(budget: Budget, patient: bool) -> Self {
        let reader = (budget.reader)();
        let newest = Vec::new();
        let mut meter =
            Self { budget, reader, patient, reasoned: 0, newest, forced: None, over: false };
        meter.judge();
        meter
    }

    /// Follows committed tokens.
    pub(super) fn advance(&mut self, tokens: &[Token]) {
        for &token in tokens {
            if self.over {
                return;
            }
            self.take(token);
        }
    }

    /// The mask of the next token, if it is forced.
    pub(super) fn mask(&self) -> Option<Vec<u32>> {
        let token = self.forced()?;
        let mut words = vec![0; self.budget.vocab_size.div_ceil(32) as usize];
        words[token as usize / 32] |= 1 << (token % 32);
        Some(words)
    }

    /// The mask of a token that may be any.
    pub(super) fn open_mask(&self) -> Vec<u32> {
        let vocab_size = self.budget.vocab_size;
        let mut words = vec![u32::MAX; vocab_size.div_ceil(32) as usize];
        if let Some(last) = words.last_mut().filter(|_| !vocab_size.is_multiple_of(32)) {
            *last = (1 << (vocab_size % 32)) - 1;
        }
        words
    }

    fn forced(&self) -> Option<Token> {
        self.forced.and_then(|done| self.budget.mark.get(done).copied())
    }

    /// Whether it forces nothing any more, whatever comes.
    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    fn take(&mut self, token: Token) {
        let before = self.reader.stands();
        self.reader.push(token);
        if let Some(done) = self.forced.filter(|&done| self.budget.mark.get(done) == Some(&token)) {
            self.forced = Some(done + 1);
            self.over = done + 1 == self.budget.mark.len();
            return;
        }
        self.forced = None;
        if matches!(before, Reading::Inside { .. }) {
            self.reasoned += 1;
            self.newest.push(token);
            let extra = (self.newest.len() + 1).saturating_sub(self.budget.mark.len());
            self.newest.drain(..extra);
        }
        self.judge();
    }

    /// Forces the mark if it is time. A mark that the model has begun is finished, not begun anew.
    fn judge(&mut self) {
        match self.reader.stands() {
            Reading::Before => {}
            Reading::Behind => self.over = true,
            Reading::Inside { whole } => {
                let spent = self.reasoned >= self.budget.tokens;
                let limit = self.budget.tokens.saturating_add(PATIENCE_TOKENS);
                if spent && (whole || !self.patient || self.reasoned >= limit) {
                    let mark = &self.budget.mark;
                    let begun = (1..mark.len()).rev().find(|&n| self.newest.ends_with(&mark[..n]));
                    self.forced = Some(begun.unwrap_or(0));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN: Token = 90;
    const MARK: [Token; 3] = [7, 8, 9];
    const HALF: Token = 91;

    /// Reasons from `OPEN` on, or from the start, to the mark; `HALF` is a part of a character.
    struct Script {
        seen: Vec<Token>,
        inside: bool,
    }

    impl Reader for Script {
        fn push(&mut self, token: Token) {
            self.inside |= token == OPEN;
            self.seen.push(token);
        }

        fn stands(&self) -> Reading {
            match self.seen.windows(MARK.len()).any(|window| window == MARK) {
                true => Reading::Behind,
                false if self.inside => Reading::Inside { whole: self.seen.last() != Some(&HALF) },
                false => Reading::Before,
            }
        }
    }

    fn meter(tokens: u32, inside: bool, patient: bool) -> Meter {
        let reader: NewReader = Arc::new(move || Box::new(Script { seen: Vec::new(), inside }));
        Meter::new(Budget { tokens, mark: MARK.into(), vocab_size: 70, reader }, patient)
    }

    #[test]
    fn masks_are_of_one_id_or_of_all() {
        assert_eq!(meter(0, true, false).mask(), Some(vec![1 << 7, 0, 0]));
        let open = meter(1, true, false);
        assert_eq!((open.mask(), open.open_mask()), (None, vec![u32::MAX, u32::MAX, 0b11_1111]));
    }

    /// What an output of these wishes becomes, as far as the budget is not over.
    fn said(mut meter: Meter, wishes: &[Token]) -> Vec<Token> {
        let mut said = Vec::new();
        for &wish in wishes {
            let token = meter.forced().unwrap_or(wish);
            meter.advance(&[token]);
            said.push(token);
        }
        assert!(meter.is_over(), "{said:?}");
        assert_eq!(meter.forced(), None, "{said:?}");
        said
    }

    #[test]
    fn a_mark_is_forced_behind_the_budget_and_once() {
        assert_eq!(said(meter(2, true, false), &[1, 2, 3, 4, 5, 6]), [1, 2, 7, 8, 9, 6]);
        assert_eq!(said(meter(0, true, false), &[1, 2, 3, 4]), [7, 8, 9, 4]);
        assert_eq!(
            said(meter(2, false, false), &[1, OPEN, 1, 2, 3, 4, 5, 6]),
            [1, OPEN, 1, 2, 7, 8, 9, 6]
        );
        assert_eq!(said(meter(0, false, false), &[OPEN, 1, 2, 3]), [OPEN, 7, 8, 9]);
    }

    #[test]
    fn an_end_in_time_is_left_alone() {
        assert_eq!(
            said(meter(5, true, false), &[1, 7, 8, 9, 5, 6, 6, 6, 6]),
            [1, 7, 8, 9, 5, 6, 6, 6, 6]
        );
        let mut open = meter(1, false, false);
        open.advance(&[1, 2, 3]);
        assert!(open.forced().is_none() && !open.is_over(), "nobody reasons yet");
    }

    #[test]
    fn a_mark_that_is_begun_is_finished() {
        assert_eq!(said(meter(2, true, false), &[1, 7, 1, 1]), [1, 7, 8, 9]);
        assert_eq!(said(meter(3, true, false), &[1, 7, 8, 1]), [1, 7, 8, 9]);
        assert_eq!(said(meter(3, true, false), &[1, 7, 7, 1, 1]), [1, 7, 7, 8, 9]);
    }

    #[test]
    fn a_character_is_finished_where_a_grammar_reads_it() {
        assert_eq!(said(meter(1, true, true), &[HALF, 2, 1, 1, 1]), [HALF, 2, 7, 8, 9]);
        assert_eq!(said(meter(1, true, false), &[HALF, 2, 1, 1]), [HALF, 7, 8, 9]);
        let broken = [HALF, HALF, HALF, HALF, HALF, HALF, HALF];
        assert_eq!(said(meter(1, true, true), &broken), [HALF, HALF, HALF, HALF, 7, 8, 9]);
    }
}
