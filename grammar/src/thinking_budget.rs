//! A budget of reasoning: once an output has reasoned for so many tokens, the mark that ends its reasoning is forced,
//! token by token.
//!
//! Follows committed tokens and nothing else, as sessions do. Whoever brings a budget brings the [`ReasoningTracker`] that tells
//! reasoning from the rest, so that budget and reply never disagree about where reasoning ends.

use protocol::Token;
use std::sync::Arc;

/// Tokens beyond its budget that an output may take to finish a character, where a grammar reads it: one of broken
/// characters leaves every grammar. No character has more bytes than these and one.
const CHARACTER_GRACE_TOKENS: u32 = 3;

/// Where an output stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningState {
    /// Reasoning may yet begin.
    Before,
    /// Inside reasoning.
    Inside {
        /// No character is unfinished.
        at_character_boundary: bool,
    },
    /// Behind it, or there will be none.
    After,
}

/// Reads one output.
pub trait ReasoningTracker: Send {
    /// Takes the next token.
    fn push(&mut self, token: Token);

    /// Where the output stands behind the tokens so far.
    fn state(&self) -> ReasoningState;
}

/// Makes the reader of one output.
pub type ReasoningTrackerFactory = Arc<dyn Fn() -> Box<dyn ReasoningTracker> + Send + Sync>;

/// How long an output may reason, and how it is stopped.
#[derive(Clone)]
pub struct ThinkingBudget {
    /// Reasoning tokens at most.
    pub tokens: u32,
    /// Ids that end the reasoning; never empty.
    pub end_marker: Arc<[Token]>,
    /// Ids below this exist: the model's, which may be more than the tokenizer's.
    pub vocab_size: u32,
    /// Who tells where the output stands.
    pub new_tracker: ReasoningTrackerFactory,
}

impl std::fmt::Debug for ThinkingBudget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { tokens, end_marker: mark, .. } = self;
        f.debug_struct("Budget").field("tokens", tokens).field("mark", mark).finish_non_exhaustive()
    }
}

/// One output under its budget.
pub(super) struct ThinkingBudgetState {
    budget: ThinkingBudget,
    tracker: Box<dyn ReasoningTracker>,
    /// Whether the grammar behind the reasoning reads it too.
    waits_for_character: bool,
    reasoned: u32,
    /// The newest reasoning tokens, fewer than the mark has.
    newest: Vec<Token>,
    /// Tokens of the mark that are there, once the rest of it is forced.
    forced: Option<usize>,
    done: bool,
}

impl ThinkingBudgetState {
    /// An output before its first token; `patient`: it must not be cut within a character.
    pub(super) fn new(budget: ThinkingBudget, patient: bool) -> Self {
        let reader = (budget.new_tracker)();
        let newest = Vec::new();
        let mut meter = Self {
            budget,
            tracker: reader,
            waits_for_character: patient,
            reasoned: 0,
            newest,
            forced: None,
            done: false,
        };
        meter.force_if_spent();
        meter
    }

    /// Follows committed tokens.
    pub(super) fn advance(&mut self, tokens: &[Token]) {
        for &token in tokens {
            if self.done {
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
    pub(super) fn unrestricted_mask(&self) -> Vec<u32> {
        let vocab_size = self.budget.vocab_size;
        let mut words = vec![u32::MAX; vocab_size.div_ceil(32) as usize];
        if let Some(last) = words.last_mut().filter(|_| !vocab_size.is_multiple_of(32)) {
            *last = (1 << (vocab_size % 32)) - 1;
        }
        words
    }

    fn forced(&self) -> Option<Token> {
        self.forced.and_then(|done| self.budget.end_marker.get(done).copied())
    }

    /// Whether it forces nothing any more, whatever comes.
    pub(super) fn is_done(&self) -> bool {
        self.done
    }

    fn take(&mut self, token: Token) {
        let before = self.tracker.state();
        self.tracker.push(token);
        if let Some(done) =
            self.forced.filter(|&done| self.budget.end_marker.get(done) == Some(&token))
        {
            self.forced = Some(done + 1);
            self.done = done + 1 == self.budget.end_marker.len();
            return;
        }
        self.forced = None;
        if matches!(before, ReasoningState::Inside { .. }) {
            self.reasoned += 1;
            self.newest.push(token);
            let extra = (self.newest.len() + 1).saturating_sub(self.budget.end_marker.len());
            self.newest.drain(..extra);
        }
        self.force_if_spent();
    }

    /// Forces the mark if it is time. A mark that the model has begun is finished, not begun anew.
    fn force_if_spent(&mut self) {
        match self.tracker.state() {
            ReasoningState::Before => {}
            ReasoningState::After => self.done = true,
            ReasoningState::Inside { at_character_boundary: whole } => {
                let spent = self.reasoned >= self.budget.tokens;
                let limit = self.budget.tokens.saturating_add(CHARACTER_GRACE_TOKENS);
                if spent && (whole || !self.waits_for_character || self.reasoned >= limit) {
                    let mark = &self.budget.end_marker;
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
    const END_MARKER: [Token; 3] = [7, 8, 9];
    const HALF: Token = 91;

    /// Reasons from `OPEN` on, or from the start, to the mark; `HALF` is a part of a character.
    struct ScriptedTracker {
        seen: Vec<Token>,
        inside: bool,
    }

    impl ReasoningTracker for ScriptedTracker {
        fn push(&mut self, token: Token) {
            self.inside |= token == OPEN;
            self.seen.push(token);
        }

        fn state(&self) -> ReasoningState {
            match self.seen.windows(END_MARKER.len()).any(|window| window == END_MARKER) {
                true => ReasoningState::After,
                false if self.inside => ReasoningState::Inside {
                    at_character_boundary: self.seen.last() != Some(&HALF),
                },
                false => ReasoningState::Before,
            }
        }
    }

    fn meter(tokens: u32, inside: bool, patient: bool) -> ThinkingBudgetState {
        let reader: ReasoningTrackerFactory =
            Arc::new(move || Box::new(ScriptedTracker { seen: Vec::new(), inside }));
        ThinkingBudgetState::new(
            ThinkingBudget {
                tokens,
                end_marker: END_MARKER.into(),
                vocab_size: 70,
                new_tracker: reader,
            },
            patient,
        )
    }

    #[test]
    fn budget_masks_allow_one_id_or_all() {
        assert_eq!(meter(0, true, false).mask(), Some(vec![1 << 7, 0, 0]));
        let open = meter(1, true, false);
        assert_eq!(
            (open.mask(), open.unrestricted_mask()),
            (None, vec![u32::MAX, u32::MAX, 0b11_1111])
        );
    }

    /// What an output of these wishes becomes, as far as the budget is not over.
    fn forced_output(mut meter: ThinkingBudgetState, wishes: &[Token]) -> Vec<Token> {
        let mut said = Vec::new();
        for &wish in wishes {
            let token = meter.forced().unwrap_or(wish);
            meter.advance(&[token]);
            said.push(token);
        }
        assert!(meter.is_done(), "{said:?}");
        assert_eq!(meter.forced(), None, "{said:?}");
        said
    }

    #[test]
    fn end_marker_is_forced_once_after_the_budget() {
        assert_eq!(forced_output(meter(2, true, false), &[1, 2, 3, 4, 5, 6]), [1, 2, 7, 8, 9, 6]);
        assert_eq!(forced_output(meter(0, true, false), &[1, 2, 3, 4]), [7, 8, 9, 4]);
        assert_eq!(
            forced_output(meter(2, false, false), &[1, OPEN, 1, 2, 3, 4, 5, 6]),
            [1, OPEN, 1, 2, 7, 8, 9, 6]
        );
        assert_eq!(forced_output(meter(0, false, false), &[OPEN, 1, 2, 3]), [OPEN, 7, 8, 9]);
    }

    #[test]
    fn reasoning_ended_in_time_is_not_forced() {
        assert_eq!(
            forced_output(meter(5, true, false), &[1, 7, 8, 9, 5, 6, 6, 6, 6]),
            [1, 7, 8, 9, 5, 6, 6, 6, 6]
        );
        let mut open = meter(1, false, false);
        open.advance(&[1, 2, 3]);
        assert!(open.forced().is_none() && !open.is_done(), "nobody reasons yet");
    }

    #[test]
    fn partial_end_marker_is_completed() {
        assert_eq!(forced_output(meter(2, true, false), &[1, 7, 1, 1]), [1, 7, 8, 9]);
        assert_eq!(forced_output(meter(3, true, false), &[1, 7, 8, 1]), [1, 7, 8, 9]);
        assert_eq!(forced_output(meter(3, true, false), &[1, 7, 7, 1, 1]), [1, 7, 7, 8, 9]);
    }

    #[test]
    fn budget_waits_for_character_boundary_before_grammar() {
        assert_eq!(forced_output(meter(1, true, true), &[HALF, 2, 1, 1, 1]), [HALF, 2, 7, 8, 9]);
        assert_eq!(forced_output(meter(1, true, false), &[HALF, 2, 1, 1]), [HALF, 7, 8, 9]);
        let broken = [HALF, HALF, HALF, HALF, HALF, HALF, HALF];
        assert_eq!(forced_output(meter(1, true, true), &broken), [HALF, HALF, HALF, HALF, 7, 8, 9]);
    }
}
