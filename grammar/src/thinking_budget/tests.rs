//! Tests of the end of the reasoning.

use super::*;

const OPEN: Token = 90;
const END_MARKER: [Token; 3] = [7, 8, 9];
const HALF: Token = 91;

/// Test tracker. Reasoning begins at the token `OPEN` or at the start of the output, and ends at the
/// end marker. The token `HALF` is an incomplete UTF-8 character.
#[derive(Clone)]
struct TestReasoningTracker {
    seen: Vec<Token>,
    inside: bool,
}

impl ReasoningTracker for TestReasoningTracker {
    fn push(&mut self, token: Token) {
        self.inside |= token == OPEN;
        self.seen.push(token);
    }

    fn state(&self) -> ReasoningState {
        match self.seen.windows(END_MARKER.len()).any(|window| window == END_MARKER) {
            true => ReasoningState::After,
            false if self.inside => {
                ReasoningState::Inside { at_character_boundary: self.seen.last() != Some(&HALF) }
            }
            false => ReasoningState::Before,
        }
    }

    fn boxed_clone(&self) -> Box<dyn ReasoningTracker> {
        Box::new(self.clone())
    }
}

fn budget_state(tokens: u32, inside: bool, waits_for_character: bool) -> ThinkingBudgetState {
    let new_tracker: ReasoningTrackerFactory =
        Arc::new(move || Box::new(TestReasoningTracker { seen: Vec::new(), inside }));
    let end_marker = END_MARKER.into();
    let (answer_opening, vocab_size) = (None, 70);
    ThinkingBudgetState::new(
        ThinkingBudget { tokens, end_marker, answer_opening, vocab_size, new_tracker },
        waits_for_character,
    )
}

/// Token that begins the answer of an output in which reasoning may begin again.
const ANSWER: Token = 92;

/// Test tracker of an output with several parts: `OPEN` begins reasoning, `END_MARKER[0]` ends it, and no
/// reasoning follows `ANSWER`.
#[derive(Clone)]
struct MessageReasoningTracker(ReasoningState);

impl ReasoningTracker for MessageReasoningTracker {
    fn push(&mut self, token: Token) {
        self.0 = match token {
            _ if self.0 == ReasoningState::After => ReasoningState::After,
            OPEN => ReasoningState::Inside { at_character_boundary: true },
            ANSWER => ReasoningState::After,
            token if token == END_MARKER[0] => ReasoningState::Before,
            _ => self.0,
        };
    }

    fn state(&self) -> ReasoningState {
        self.0
    }

    fn boxed_clone(&self) -> Box<dyn ReasoningTracker> {
        Box::new(self.clone())
    }
}

#[test]
fn reasoning_that_begins_again_is_ended_by_the_answer() {
    let output = |tokens: u32, proposed: &[Token]| {
        let new_tracker: ReasoningTrackerFactory =
            Arc::new(|| Box::new(MessageReasoningTracker(ReasoningState::Before)));
        let end_marker = END_MARKER[..2].into();
        let answer_opening = Some([END_MARKER[0], END_MARKER[1], ANSWER].into());
        let vocab_size = 128;
        let budget = ThinkingBudget { tokens, end_marker, answer_opening, vocab_size, new_tracker };
        forced_output(ThinkingBudgetState::new(budget, false), proposed)
    };
    assert_eq!(output(1, &[OPEN, 1, 1, 1, 5, ANSWER, 1]), [OPEN, 1, 7, 8, 5, ANSWER, 1]);
    assert_eq!(
        output(1, &[OPEN, 1, 1, 1, 5, OPEN, 1, 1, 1, OPEN, 1]),
        [OPEN, 1, 7, 8, 5, OPEN, 7, 8, ANSWER, OPEN, 1]
    );
    // The tokens of all parts of the reasoning count.
    assert_eq!(
        output(3, &[OPEN, 1, 1, 7, 5, OPEN, 1, 1, ANSWER]),
        [OPEN, 1, 1, 7, 5, OPEN, 7, 8, ANSWER]
    );
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

/// Returns the output of a model that proposes the tokens `proposed`, with the tokens forced by the
/// budget replacing proposals.
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
    assert_eq!(forced_output(budget_state(1, true, true), &[HALF, 2, 1, 1, 1]), [HALF, 2, 7, 8, 9]);
    assert_eq!(forced_output(budget_state(1, true, false), &[HALF, 2, 1, 1]), [HALF, 7, 8, 9]);
    let broken = [HALF, HALF, HALF, HALF, HALF, HALF, HALF];
    assert_eq!(
        forced_output(budget_state(1, true, true), &broken),
        [HALF, HALF, HALF, HALF, 7, 8, 9]
    );
}
