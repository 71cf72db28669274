//! Proposes draft tokens by n-gram lookup in the token history of a request.
//!
//! The lookup reads the token history on the host, so a step with draft tokens waits for the outputs of all
//! earlier steps, which the reply thread produces. All ranks of a replica compute the same outputs, so they
//! propose the same draft tokens.

use super::ngram_matcher::NgramMatcher;
use super::{DraftProposal, Proposer};
use crate::sequence_slots::SlotOwner;
use protocol::{BatchRow, RowInput, RowOutput, SequenceSlot, SpeculativeConfig, Token, TokenVec};
use std::sync::mpsc::{Receiver, Sender, channel};

/// Proposes the tokens that followed an earlier occurrence of a request's newest tokens.
pub(crate) struct NgramProposer {
    matcher: NgramMatcher,
    max_drafts: usize,
    histories: Vec<TokenHistory>,
    updates: (Sender<EmittedTokens>, Receiver<EmittedTokens>),
    /// Number of submitted steps whose emitted tokens have not yet been received from `updates`.
    pending_updates: usize,
}

/// Token history of the request in a sequence slot.
#[derive(Default)]
struct TokenHistory {
    owner: Option<SlotOwner>,
    tokens: Vec<Token>,
}

/// Tokens that the rows of a step have emitted.
#[derive(Default)]
struct EmittedTokens(Vec<EmittedRowTokens>);

/// Tokens that one row has emitted.
struct EmittedRowTokens {
    slot: SequenceSlot,
    owner: SlotOwner,
    tokens: TokenVec,
}

/// Sends the emitted tokens of a step to the proposer when it is dropped. If the step failed, it sends an
/// empty list.
pub(crate) struct EmittedTokenSender {
    sender: Sender<EmittedTokens>,
    rows: Vec<SamplingRow>,
    updates: EmittedTokens,
}

/// A batch row that samples a token, with the sequence slot and the request to which the sampled tokens
/// belong.
#[derive(Clone, Copy)]
struct SamplingRow {
    /// Index of the row in the batch.
    index: usize,
    slot: SequenceSlot,
    owner: SlotOwner,
}

impl NgramProposer {
    /// Creates the proposer; `None` = a method other than n-gram lookup is configured.
    pub(crate) fn new(speculation: SpeculativeConfig, seq_slots: usize) -> Option<Self> {
        let SpeculativeConfig { draft_tokens: drafts, method, .. } = speculation;
        let protocol::SpeculativeMethod::Ngram { lookup_min: min, lookup_max: max } = method else {
            return None;
        };
        Some(Self {
            matcher: NgramMatcher { min: min.max(1).into(), max: max.max(min).max(1).into() },
            max_drafts: drafts.into(),
            histories: (0..seq_slots).map(|_| TokenHistory::default()).collect(),
            updates: channel(),
            pending_updates: 0,
        })
    }
}

impl Proposer for NgramProposer {
    /// Proposes draft tokens only if the host has received all tokens of the request before the row.
    fn propose(&mut self, row: &BatchRow) -> DraftProposal<'_> {
        let history = &mut self.histories[row.seq_slot.0 as usize];
        if let Some(init) = &row.seq_init {
            history.owner = Some(SlotOwner::of(row));
            history.tokens.clone_from(&init.token_history);
        }
        let max_drafts = self.max_drafts.min(row.drafts.into());
        let from_host = matches!(row.input, RowInput::Tokens(_));
        let complete = history.tokens.len() == row.start as usize + row.len as usize;
        if max_drafts == 0 || !from_host || !complete {
            return DraftProposal::Tokens(&[]);
        }
        DraftProposal::Tokens(self.matcher.propose(&history.tokens, max_drafts))
    }

    /// Receives the emitted tokens of earlier steps. If any row has draft tokens to verify, waits for the
    /// emitted tokens of all steps in flight.
    #[expect(clippy::disallowed_methods, reason = "steps in flight have a deadline")]
    fn observe(&mut self, rows: &[BatchRow]) {
        let waits = rows.iter().any(|row| row.drafts > 0);
        while self.pending_updates > 0 {
            let received =
                if waits { self.updates.1.recv().ok() } else { self.updates.1.try_recv().ok() };
            let Some(EmittedTokens(emitted)) = received else { return };
            self.pending_updates -= 1;
            for EmittedRowTokens { slot, owner, tokens } in emitted {
                let history = &mut self.histories[slot.0 as usize];
                if history.owner == Some(owner) {
                    history.tokens.extend_from_slice(&tokens);
                }
            }
        }
    }

    fn observe_outputs(&mut self, rows: &[BatchRow]) -> Option<EmittedTokenSender> {
        self.pending_updates += 1;
        let sampling = rows.iter().enumerate().filter(|(_, row)| row.samples);
        let sampling = sampling.map(|(index, row)| SamplingRow {
            index,
            slot: row.seq_slot,
            owner: SlotOwner::of(row),
        });
        let rows = sampling.collect();
        let (sender, updates) = (self.updates.0.clone(), EmittedTokens::default());
        Some(EmittedTokenSender { sender, rows, updates })
    }
}

impl EmittedTokenSender {
    /// Copies the emitted tokens from the outputs of the step. They are sent to the proposer when `self` is
    /// dropped.
    pub(crate) fn record_outputs(&mut self, outputs: &[RowOutput]) {
        let emitted = |row: &SamplingRow| {
            let SamplingRow { index, slot, owner } = *row;
            EmittedRowTokens { slot, owner, tokens: outputs[index].sampled_tokens.clone() }
        };
        self.updates.0 = self.rows.iter().map(emitted).collect();
    }
}

impl Drop for EmittedTokenSender {
    fn drop(&mut self) {
        // The send fails if the proposer was dropped.
        let _ = self.sender.send(std::mem::take(&mut self.updates));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deadlines::BoundedJoin as _;
    use protocol::{DraftAcceptanceRule, RequestId, SamplingParams, SequenceInit, ThinVec};

    fn row(start: u32, ids: &[Token], drafts: u8) -> BatchRow {
        BatchRow {
            request: RequestId(1),
            epoch: 0,
            seq_slot: SequenceSlot(0),
            start,
            len: ids.len() as u32,
            drafts,
            samples: true,
            masked: false,
            input: RowInput::Tokens(ids.into()),
            table_updates: ThinVec::new(),
            state_slots: protocol::ThinVec::new(),
            next_token: None,
            seq_init: None,
        }
    }

    fn first(history: &[Token]) -> BatchRow {
        let (sampling, history) = (SamplingParams::greedy(), history.to_vec());
        let init = SequenceInit { sampling, rng_key: 0, prompt_len: 4, token_history: history };
        BatchRow { seq_init: Some(Box::new(init)), ..row(0, &[5, 6, 7, 5], 0) }
    }

    fn ngram_proposer() -> NgramProposer {
        let ngram = protocol::SpeculativeMethod::Ngram { lookup_min: 1, lookup_max: 3 };
        NgramProposer::new(
            SpeculativeConfig {
                draft_tokens: 3,
                method: ngram,
                acceptance: DraftAcceptanceRule::Exact,
            },
            1,
        )
        .expect("the method is n-gram lookup")
    }

    fn history_update(emitted_sender: &mut EmittedTokenSender, ids: &[Token]) {
        emitted_sender
            .record_outputs(&[RowOutput { sampled_tokens: ids.into(), ..RowOutput::default() }]);
    }

    #[test]
    fn drafts_follow_token_history() {
        let mut proposer = ngram_proposer();
        let prompt = first(&[5, 6, 7, 5]);
        assert_eq!(
            proposer.propose(&prompt),
            DraftProposal::Tokens(&[]),
            "the row verifies no draft tokens"
        );
        history_update(&mut proposer.observe_outputs(&[prompt]).unwrap(), &[6]);
        let next = row(4, &[6], 2);
        proposer.observe(std::slice::from_ref(&next));
        assert_eq!(
            proposer.propose(&next),
            DraftProposal::Tokens(&[7, 5]),
            "the row verifies two drafts"
        );
        history_update(&mut proposer.observe_outputs(&[next]).unwrap(), &[7, 9]);
        let next = row(6, &[9], 3);
        proposer.observe(std::slice::from_ref(&next));
        assert_eq!(
            proposer.propose(&next),
            DraftProposal::Tokens(&[]),
            "9 has no earlier occurrence"
        );
    }

    #[test]
    fn step_waits_for_outputs_only_when_drafting() {
        let mut proposer = ngram_proposer();
        let mut emitted_sender = proposer.observe_outputs(&[first(&[5, 6, 7, 5])]).unwrap();
        proposer.propose(&first(&[5, 6, 7, 5]));
        let next = row(4, &[6], 0);
        proposer.observe(std::slice::from_ref(&next));
        assert_eq!(proposer.pending_updates, 1);
        history_update(&mut emitted_sender, &[6]);
        let next = row(4, &[6], 3);
        let sender_thread = std::thread::spawn(move || drop(emitted_sender));
        proposer.observe(std::slice::from_ref(&next));
        assert_eq!(proposer.propose(&next), DraftProposal::Tokens(&[7, 5, 6]));
        sender_thread.join_bounded();
    }

    #[test]
    fn incomplete_history_yields_no_drafts() {
        let mut proposer = ngram_proposer();
        proposer.propose(&first(&[]));
        assert_eq!(proposer.propose(&row(4, &[6], 3)), DraftProposal::Tokens(&[]), "no history");
        proposer.propose(&first(&[5, 6, 7, 5]));
        assert_eq!(
            proposer.propose(&row(4, &[6], 3)),
            DraftProposal::Tokens(&[]),
            "the output 6 was not received"
        );
        drop(proposer.observe_outputs(&[first(&[5, 6, 7, 5])]).unwrap());
        let step = RowInput::SampledAt { step: protocol::StepId(1), draft_slack: 0 };
        assert_eq!(
            proposer.propose(&BatchRow { input: step, ..row(3, &[5], 3) }),
            DraftProposal::Tokens(&[])
        );
        assert_eq!(proposer.propose(&row(3, &[5], 3)), DraftProposal::Tokens(&[6, 7, 5]));
        let other = BatchRow { request: RequestId(2), ..first(&[1, 2, 1]) };
        let mut late_sender = proposer.observe_outputs(&[row(3, &[5], 0)]).unwrap();
        history_update(&mut late_sender, &[6]);
        drop(late_sender);
        proposer.propose(&other);
        let next = BatchRow { request: RequestId(2), ..row(2, &[1], 3) };
        proposer.observe(std::slice::from_ref(&next));
        assert_eq!(
            proposer.propose(&next),
            DraftProposal::Tokens(&[2, 1]),
            "late output of another request"
        );
    }
}
