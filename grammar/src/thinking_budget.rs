//! Thinking budget: after a number of reasoning tokens, the end marker of the reasoning is forced token by
//! token.
//!
//! The budget follows committed tokens only, as grammar sessions do. Its creator passes the
//! [`ReasoningTracker`] that separates reasoning from the answer, so that the budget and the response agree
//! on where reasoning ends.

use protocol::Token;
use std::sync::Arc;

/// Number of tokens beyond the budget that an output may use to complete a UTF-8 character before a grammar
/// starts: a broken character violates every grammar. A character has at most one byte more than this number.
const CHARACTER_GRACE_TOKENS: u32 = 3;

/// Position of an output relative to its reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningState {
    /// Reasoning has not started and may start.
    Before,
    /// The output is inside its reasoning.
    Inside {
        /// Whether the output ends with a complete character.
        at_character_boundary: bool,
    },
    /// The reasoning has ended, or there will be none.
    After,
}

/// Tracks the reasoning state of one output.
pub trait ReasoningTracker: Send {
    /// Advances by a token.
    fn push(&mut self, token: Token);

    /// Returns the state after the tokens so far.
    fn state(&self) -> ReasoningState;

    /// Returns a copy, which follows draft tokens.
    fn boxed_clone(&self) -> Box<dyn ReasoningTracker>;
}

impl Clone for Box<dyn ReasoningTracker> {
    fn clone(&self) -> Self {
        (**self).boxed_clone()
    }
}

/// Creates the tracker of one output.
pub type ReasoningTrackerFactory = Arc<dyn Fn() -> Box<dyn ReasoningTracker> + Send + Sync>;

/// Limit on the number of reasoning tokens of an output.
#[derive(Clone)]
pub struct ThinkingBudget {
    /// Maximum number of reasoning tokens.
    pub tokens: u32,
    /// Token ids that end the reasoning; not empty.
    pub end_marker: Arc<[Token]>,
    /// Vocabulary size of the model, which may be larger than the tokenizer's.
    pub vocab_size: u32,
    /// Factory of the reasoning tracker.
    pub new_tracker: ReasoningTrackerFactory,
}

impl std::fmt::Debug for ThinkingBudget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { tokens, end_marker, .. } = self;
        f.debug_struct("ThinkingBudget")
            .field("tokens", tokens)
            .field("end_marker", end_marker)
            .finish_non_exhaustive()
    }
}

/// State of one output with a thinking budget.
#[derive(Clone)]
pub(super) struct ThinkingBudgetState {
    budget: ThinkingBudget,
    tracker: Box<dyn ReasoningTracker>,
    /// Whether the end marker must not be forced inside a character, because a grammar follows the reasoning.
    waits_for_character: bool,
    reasoned: u32,
    /// Newest reasoning tokens, to find out how much of the end marker the model has generated itself; at
    /// most one token fewer than the end marker has.
    recent: Vec<Token>,
    /// Number of tokens of the end marker in the output, once the rest of the marker is forced.
    forced: Option<usize>,
    done: bool,
}

impl ThinkingBudgetState {
    /// Creates the state of an output before its first token. With `waits_for_character`, the end marker is
    /// not forced inside a character.
    pub(super) fn new(budget: ThinkingBudget, waits_for_character: bool) -> Self {
        let tracker = (budget.new_tracker)();
        let recent = Vec::new();
        let mut state = Self {
            budget,
            tracker,
            waits_for_character,
            reasoned: 0,
            recent,
            forced: None,
            done: false,
        };
        state.force_if_spent();
        state
    }

    /// Advances the budget and its reasoning tracker by tokens committed to the output.
    pub(super) fn advance(&mut self, tokens: &[Token]) {
        for &token in tokens {
            if self.done {
                return;
            }
            self.take(token);
        }
    }

    /// Returns the mask of the next token, if the token is forced.
    pub(super) fn mask(&self) -> Option<Vec<u32>> {
        let token = self.forced()?;
        let mut bitmask = vec![0; self.budget.vocab_size.div_ceil(32) as usize];
        bitmask[token as usize / 32] |= 1 << (token % 32);
        Some(bitmask)
    }

    /// Returns the mask that allows all tokens.
    pub(super) fn unrestricted_mask(&self) -> Vec<u32> {
        let vocab_size = self.budget.vocab_size;
        let mut bitmask = vec![u32::MAX; vocab_size.div_ceil(32) as usize];
        if let Some(last) = bitmask.last_mut().filter(|_| !vocab_size.is_multiple_of(32)) {
            *last = (1 << (vocab_size % 32)) - 1;
        }
        bitmask
    }

    /// Returns the token that is forced next.
    pub(super) fn forced(&self) -> Option<Token> {
        self.forced.and_then(|done| self.budget.end_marker.get(done).copied())
    }

    /// Whether no later token can be forced.
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
            self.recent.push(token);
            let extra = (self.recent.len() + 1).saturating_sub(self.budget.end_marker.len());
            self.recent.drain(..extra);
        }
        self.force_if_spent();
    }

    /// Forces the end marker if the budget is spent. A marker that the model has started is completed, not
    /// repeated.
    fn force_if_spent(&mut self) {
        match self.tracker.state() {
            ReasoningState::Before => {}
            ReasoningState::After => self.done = true,
            ReasoningState::Inside { at_character_boundary } => {
                let spent = self.reasoned >= self.budget.tokens;
                let limit = self.budget.tokens.saturating_add(CHARACTER_GRACE_TOKENS);
                if spent
                    && (at_character_boundary
                        || !self.waits_for_character
                        || self.reasoned >= limit)
                {
                    let end_marker = &self.budget.end_marker;
                    let started = (1..end_marker.len())
                        .rev()
                        .find(|&n| self.recent.ends_with(&end_marker[..n]));
                    self.forced = Some(started.unwrap_or(0));
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

    /// Tracker that reasons from `OPEN`, or from the start, to the end marker; `HALF` is a part of a
    /// character.
    #[derive(Clone)]
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

        fn boxed_clone(&self) -> Box<dyn ReasoningTracker> {
            Box::new(self.clone())
        }
    }

    fn budget_state(tokens: u32, inside: bool, waits_for_character: bool) -> ThinkingBudgetState {
        let new_tracker: ReasoningTrackerFactory =
            Arc::new(move || Box::new(ScriptedTracker { seen: Vec::new(), inside }));
        ThinkingBudgetState::new(
            ThinkingBudget { tokens, end_marker: END_MARKER.into(), vocab_size: 70, new_tracker },
            waits_for_character,
        )
    }

    #[test]
    fn budget_masks_allow_one_id_or_all() {
        assert_eq!(budget_state(0, true, false).mask(), Some(vec![1 << 7, 0, 0]));
        let unspent = budget_state(1, true, false);
        assert_eq!(
            (unspent.mask(), unspent.unrestricted_mask()),
            (None, vec![u32::MAX, u32::MAX, 0b11_1111])
        );
    }

    /// Returns the output of a model that would emit `proposed`, with the tokens that the budget forces.
    fn forced_output(mut state: ThinkingBudgetState, proposed: &[Token]) -> Vec<Token> {
        let mut output = Vec::new();
        for &proposal in proposed {
            let token = state.forced().unwrap_or(proposal);
            state.advance(&[token]);
            output.push(token);
        }
        assert!(state.is_done(), "{output:?}");
        assert_eq!(state.forced(), None, "{output:?}");
        output
    }

    #[test]
    fn end_marker_is_forced_once_after_the_budget() {
        assert_eq!(
            forced_output(budget_state(2, true, false), &[1, 2, 3, 4, 5, 6]),
            [1, 2, 7, 8, 9, 6]
        );
        assert_eq!(forced_output(budget_state(0, true, false), &[1, 2, 3, 4]), [7, 8, 9, 4]);
        assert_eq!(
            forced_output(budget_state(2, false, false), &[1, OPEN, 1, 2, 3, 4, 5, 6]),
            [1, OPEN, 1, 2, 7, 8, 9, 6]
        );
        assert_eq!(forced_output(budget_state(0, false, false), &[OPEN, 1, 2, 3]), [OPEN, 7, 8, 9]);
    }

    #[test]
    fn reasoning_ended_in_time_is_not_forced() {
        assert_eq!(
            forced_output(budget_state(5, true, false), &[1, 7, 8, 9, 5, 6, 6, 6, 6]),
            [1, 7, 8, 9, 5, 6, 6, 6, 6]
        );
        let mut state = budget_state(1, false, false);
        state.advance(&[1, 2, 3]);
        assert!(state.forced().is_none() && !state.is_done(), "reasoning has not started");
    }

    #[test]
    fn partial_end_marker_is_completed() {
        assert_eq!(forced_output(budget_state(2, true, false), &[1, 7, 1, 1]), [1, 7, 8, 9]);
        assert_eq!(forced_output(budget_state(3, true, false), &[1, 7, 8, 1]), [1, 7, 8, 9]);
        assert_eq!(forced_output(budget_state(3, true, false), &[1, 7, 7, 1, 1]), [1, 7, 7, 8, 9]);
    }

    #[test]
    fn budget_waits_for_character_boundary_before_grammar() {
        assert_eq!(
            forced_output(budget_state(1, true, true), &[HALF, 2, 1, 1, 1]),
            [HALF, 2, 7, 8, 9]
        );
        assert_eq!(forced_output(budget_state(1, true, false), &[HALF, 2, 1, 1]), [HALF, 7, 8, 9]);
        let broken = [HALF, HALF, HALF, HALF, HALF, HALF, HALF];
        assert_eq!(
            forced_output(budget_state(1, true, true), &broken),
            [HALF, HALF, HALF, HALF, 7, 8, 9]
        );
    }
}
