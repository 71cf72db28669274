//! What requests have said, and guesses at what they say next.
//!
//! Guesses are made of tokens that the host has seen, so a step that verifies some waits for the answers of those before
//! it. Answers are formed on another thread; all ranks of a replica hear the same ones, and guess the same.

use crate::ngram_matcher::NgramMatcher;
use protocol::{
    BatchRow, RequestId, RowInput, RowOutput, SequenceSlot, SpeculativeConfig, Token, TokenVec,
};
use std::sync::mpsc::{Receiver, Sender, channel};

/// Makes drafts for rows.
pub(crate) struct NgramProposer {
    matcher: NgramMatcher,
    max_drafts: usize,
    histories: Vec<TokenHistory>,
    updates: (Sender<HistoryUpdate>, Receiver<HistoryUpdate>),
    /// Steps whose answers have not been heard.
    pending_updates: usize,
}

/// A request's tokens.
#[derive(Default)]
struct TokenHistory {
    owner: Option<(RequestId, u32)>,
    known: Vec<Token>,
}

/// What the rows of a step have emitted.
#[derive(Default)]
struct HistoryUpdate(Vec<(SequenceSlot, (RequestId, u32), TokenVec)>);

/// Tells the drafter what a step has emitted, once: also of a step that is given up, which has emitted nothing.
pub(crate) struct HistoryUpdateSender {
    to: Sender<HistoryUpdate>,
    rows: Vec<(usize, SequenceSlot, (RequestId, u32))>,
    updates: HistoryUpdate,
}

impl NgramProposer {
    /// `None` = these drafts are made otherwise.
    pub(crate) fn new(speculation: SpeculativeConfig, seats: usize) -> Option<Self> {
        let SpeculativeConfig { draft_tokens: drafts, method: drafter, .. } = speculation;
        let protocol::SpeculativeMethod::Ngram { lookup_min: min, lookup_max: max } = drafter
        else {
            return None;
        };
        Some(Self {
            matcher: NgramMatcher { min: min.max(1).into(), max: max.max(min).max(1).into() },
            max_drafts: drafts.into(),
            histories: (0..seats).map(|_| TokenHistory::default()).collect(),
            updates: channel(),
            pending_updates: 0,
        })
    }

    /// Hears what has been emitted: all of it, if one of these rows is to verify drafts.
    pub(crate) fn receive_history(&mut self, rows: &[BatchRow]) {
        let waits = rows.iter().any(|row| row.drafts > 0);
        while self.pending_updates > 0 {
            let said =
                if waits { self.updates.1.recv().ok() } else { self.updates.1.try_recv().ok() };
            let Some(HistoryUpdate(said)) = said else { return };
            self.pending_updates -= 1;
            for (seat, owner, tokens) in said {
                let told = &mut self.histories[seat.0 as usize];
                if told.owner == Some(owner) {
                    told.known.extend_from_slice(&tokens);
                }
            }
        }
    }

    /// Drafts behind a row whose seat exists: none unless all tokens in front of them are known here.
    pub(crate) fn draft(&mut self, row: &BatchRow) -> &[Token] {
        let told = &mut self.histories[row.seq_slot.0 as usize];
        if let Some(init) = &row.seq_init {
            told.owner = Some((row.request, row.epoch));
            told.known.clone_from(&init.token_history);
        }
        let most = self.max_drafts.min(row.drafts.into());
        let from_host = matches!(row.input, RowInput::Tokens(_));
        let complete = told.known.len() == row.start as usize + row.len as usize;
        if most == 0 || !from_host || !complete {
            return &[];
        }
        self.matcher.propose(&told.known, most)
    }

    /// Who tells of the step with these rows.
    pub(crate) fn history_sender(&mut self, rows: &[BatchRow]) -> HistoryUpdateSender {
        self.pending_updates += 1;
        let speaks = |(i, row): (usize, &BatchRow)| (i, row.seq_slot, (row.request, row.epoch));
        let rows = rows.iter().enumerate().filter(|(_, row)| row.samples).map(speaks).collect();
        HistoryUpdateSender { to: self.updates.0.clone(), rows, updates: HistoryUpdate::default() }
    }
}

impl HistoryUpdateSender {
    /// Notes the answers of the step.
    pub(crate) fn record_outputs(&mut self, outputs: &[RowOutput]) {
        let emitted = |&(row, seat, owner): &(usize, SequenceSlot, _)| {
            (seat, owner, outputs[row].sampled_tokens.clone())
        };
        self.updates.0 = self.rows.iter().map(emitted).collect();
    }
}

impl Drop for HistoryUpdateSender {
    fn drop(&mut self) {
        // A drafter that is gone needs no answers.
        let _ = self.to.send(std::mem::take(&mut self.updates));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::{DraftAcceptance, SamplingParams, SequenceInit, ThinVec};

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
                acceptance: DraftAcceptance::Exact,
            },
            1,
        )
        .expect("it looks tokens up")
    }

    fn history_update(speaker: &mut HistoryUpdateSender, ids: &[Token]) {
        speaker.record_outputs(&[RowOutput { sampled_tokens: ids.into(), ..RowOutput::default() }]);
    }

    #[test]
    fn drafts_follow_token_history() {
        let mut drafter = ngram_proposer();
        let prompt = first(&[5, 6, 7, 5]);
        assert_eq!(drafter.draft(&prompt), [0; 0], "the row has room for none");
        history_update(&mut drafter.history_sender(&[prompt]), &[6]);
        let next = row(4, &[6], 2);
        drafter.receive_history(std::slice::from_ref(&next));
        assert_eq!(drafter.draft(&next), [7, 5], "two of three");
        history_update(&mut drafter.history_sender(&[next]), &[7, 9]);
        let next = row(6, &[9], 3);
        drafter.receive_history(std::slice::from_ref(&next));
        assert_eq!(drafter.draft(&next), [0; 0], "9 is new");
    }

    #[test]
    fn step_waits_for_outputs_only_when_drafting() {
        let mut drafter = ngram_proposer();
        let mut speaker = drafter.history_sender(&[first(&[5, 6, 7, 5])]);
        drafter.draft(&first(&[5, 6, 7, 5]));
        let next = row(4, &[6], 0);
        drafter.receive_history(std::slice::from_ref(&next));
        assert_eq!(drafter.pending_updates, 1);
        history_update(&mut speaker, &[6]);
        let next = row(4, &[6], 3);
        let answers = std::thread::spawn(move || drop(speaker));
        drafter.receive_history(std::slice::from_ref(&next));
        assert_eq!(drafter.draft(&next), [7, 5, 6]);
        answers.join().expect("it only drops");
    }

    #[test]
    fn incomplete_history_yields_no_drafts() {
        let mut drafter = ngram_proposer();
        drafter.draft(&first(&[]));
        assert_eq!(drafter.draft(&row(4, &[6], 3)), [0; 0], "no history came");
        drafter.draft(&first(&[5, 6, 7, 5]));
        assert_eq!(drafter.draft(&row(4, &[6], 3)), [0; 0], "6 was never heard");
        drop(drafter.history_sender(&[first(&[5, 6, 7, 5])]));
        let step = RowInput::SampledAt { step: protocol::StepId(1), draft_slack: 0 };
        assert_eq!(drafter.draft(&BatchRow { input: step, ..row(3, &[5], 3) }), [0; 0]);
        assert_eq!(drafter.draft(&row(3, &[5], 3)), [6, 7, 5]);
        let other = BatchRow { request: RequestId(2), ..first(&[1, 2, 1]) };
        let mut late = drafter.history_sender(&[row(3, &[5], 0)]);
        history_update(&mut late, &[6]);
        drop(late);
        drafter.draft(&other);
        let next = BatchRow { request: RequestId(2), ..row(2, &[1], 3) };
        drafter.receive_history(std::slice::from_ref(&next));
        assert_eq!(drafter.draft(&next), [2, 1], "another request's answer came late");
    }
}
