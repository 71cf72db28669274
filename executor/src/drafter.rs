//! What requests have said, and guesses at what they say next.
//!
//! Guesses are made of tokens that the host has seen, so a step that verifies some waits for the answers of those before
//! it. Answers are formed on another thread; all ranks of a replica hear the same ones, and guess the same.

use crate::ngram::Ngram;
use protocol::{Input, RequestId, Row, RowOutput, Seat, Speculation, Token, Tokens};
use std::sync::mpsc::{Receiver, Sender, channel};

/// Makes drafts for rows.
pub(crate) struct Drafter {
    ngram: Ngram,
    most: usize,
    seats: Vec<Told>,
    said: (Sender<Said>, Receiver<Said>),
    /// Steps whose answers have not been heard.
    unheard: usize,
}

/// A request's tokens.
#[derive(Default)]
struct Told {
    owner: Option<(RequestId, u32)>,
    known: Vec<Token>,
}

/// What the rows of a step have emitted.
#[derive(Default)]
struct Said(Vec<(Seat, (RequestId, u32), Tokens)>);

/// Tells the drafter what a step has emitted, once: also of a step that is given up, which has emitted nothing.
pub(crate) struct Speaker {
    to: Sender<Said>,
    rows: Vec<(usize, Seat, (RequestId, u32))>,
    said: Said,
}

impl Drafter {
    /// `None` = these drafts are made otherwise.
    pub(crate) fn new(speculation: Speculation, seats: usize) -> Option<Self> {
        let Speculation { drafts, drafter, .. } = speculation;
        let protocol::Drafter::Ngram { min, max } = drafter else { return None };
        Some(Self {
            ngram: Ngram { min: min.max(1).into(), max: max.max(min).max(1).into() },
            most: drafts.into(),
            seats: (0..seats).map(|_| Told::default()).collect(),
            said: channel(),
            unheard: 0,
        })
    }

    /// Hears what has been emitted: all of it, if one of these rows is to verify drafts.
    pub(crate) fn hear(&mut self, rows: &[Row]) {
        let waits = rows.iter().any(|row| row.drafts > 0);
        while self.unheard > 0 {
            let said = if waits { self.said.1.recv().ok() } else { self.said.1.try_recv().ok() };
            let Some(Said(said)) = said else { return };
            self.unheard -= 1;
            for (seat, owner, tokens) in said {
                let told = &mut self.seats[seat.0 as usize];
                if told.owner == Some(owner) {
                    told.known.extend_from_slice(&tokens);
                }
            }
        }
    }

    /// Drafts behind a row whose seat exists: none unless all tokens in front of them are known here.
    pub(crate) fn draft(&mut self, row: &Row) -> &[Token] {
        let told = &mut self.seats[row.seat.0 as usize];
        if let Some(init) = &row.init {
            told.owner = Some((row.request, row.epoch));
            told.known.clone_from(&init.history);
        }
        let most = self.most.min(row.drafts.into());
        let from_host = matches!(row.input, Input::Tokens(_));
        let complete = told.known.len() == row.start as usize + row.len as usize;
        if most == 0 || !from_host || !complete {
            return &[];
        }
        self.ngram.guess(&told.known, most)
    }

    /// Who tells of the step with these rows.
    pub(crate) fn speaker(&mut self, rows: &[Row]) -> Speaker {
        self.unheard += 1;
        let speaks = |(i, row): (usize, &Row)| (i, row.seat, (row.request, row.epoch));
        let rows = rows.iter().enumerate().filter(|(_, row)| row.samples).map(speaks).collect();
        Speaker { to: self.said.0.clone(), rows, said: Said::default() }
    }
}

impl Speaker {
    /// Notes the answers of the step.
    pub(crate) fn note(&mut self, outputs: &[RowOutput]) {
        let emitted =
            |&(row, seat, owner): &(usize, Seat, _)| (seat, owner, outputs[row].emitted.clone());
        self.said.0 = self.rows.iter().map(emitted).collect();
    }
}

impl Drop for Speaker {
    fn drop(&mut self) {
        // A drafter that is gone needs no answers.
        let _ = self.to.send(std::mem::take(&mut self.said));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::{Acceptance, Sampling, SeatInit, ThinVec};

    fn row(start: u32, ids: &[Token], drafts: u8) -> Row {
        Row {
            request: RequestId(1),
            epoch: 0,
            seat: Seat(0),
            start,
            len: ids.len() as u32,
            drafts,
            samples: true,
            masked: false,
            input: Input::Tokens(ids.into()),
            tables: ThinVec::new(),
            next: None,
            init: None,
        }
    }

    fn first(history: &[Token]) -> Row {
        let (sampling, history) = (Sampling::greedy(), history.to_vec());
        let init = SeatInit { sampling, key: 0, prompt_len: 4, history };
        Row { init: Some(Box::new(init)), ..row(0, &[5, 6, 7, 5], 0) }
    }

    fn drafter() -> Drafter {
        let ngram = protocol::Drafter::Ngram { min: 1, max: 3 };
        Drafter::new(Speculation { drafts: 3, drafter: ngram, acceptance: Acceptance::Exact }, 1)
            .expect("it looks tokens up")
    }

    fn says(speaker: &mut Speaker, ids: &[Token]) {
        speaker.note(&[RowOutput { emitted: ids.into(), ..RowOutput::default() }]);
    }

    #[test]
    fn drafts_follow_what_was_said() {
        let mut drafter = drafter();
        let prompt = first(&[5, 6, 7, 5]);
        assert_eq!(drafter.draft(&prompt), [0; 0], "the row has room for none");
        says(&mut drafter.speaker(&[prompt]), &[6]);
        let next = row(4, &[6], 2);
        drafter.hear(std::slice::from_ref(&next));
        assert_eq!(drafter.draft(&next), [7, 5], "two of three");
        says(&mut drafter.speaker(&[next]), &[7, 9]);
        let next = row(6, &[9], 3);
        drafter.hear(std::slice::from_ref(&next));
        assert_eq!(drafter.draft(&next), [0; 0], "9 is new");
    }

    #[test]
    fn a_step_waits_for_answers_only_to_guess() {
        let mut drafter = drafter();
        let mut speaker = drafter.speaker(&[first(&[5, 6, 7, 5])]);
        drafter.draft(&first(&[5, 6, 7, 5]));
        let next = row(4, &[6], 0);
        drafter.hear(std::slice::from_ref(&next));
        assert_eq!(drafter.unheard, 1);
        says(&mut speaker, &[6]);
        let next = row(4, &[6], 3);
        let answers = std::thread::spawn(move || drop(speaker));
        drafter.hear(std::slice::from_ref(&next));
        assert_eq!(drafter.draft(&next), [7, 5, 6]);
        answers.join().expect("it only drops");
    }

    #[test]
    fn what_is_not_wholly_known_is_not_guessed_at() {
        let mut drafter = drafter();
        drafter.draft(&first(&[]));
        assert_eq!(drafter.draft(&row(4, &[6], 3)), [0; 0], "no history came");
        drafter.draft(&first(&[5, 6, 7, 5]));
        assert_eq!(drafter.draft(&row(4, &[6], 3)), [0; 0], "6 was never heard");
        drop(drafter.speaker(&[first(&[5, 6, 7, 5])]));
        let step = Input::SampledAt { step: protocol::StepId(1), slack: 0 };
        assert_eq!(drafter.draft(&Row { input: step, ..row(3, &[5], 3) }), [0; 0]);
        assert_eq!(drafter.draft(&row(3, &[5], 3)), [6, 7, 5]);
        let other = Row { request: RequestId(2), ..first(&[1, 2, 1]) };
        let mut late = drafter.speaker(&[row(3, &[5], 0)]);
        says(&mut late, &[6]);
        drop(late);
        drafter.draft(&other);
        let next = Row { request: RequestId(2), ..row(2, &[1], 3) };
        drafter.hear(std::slice::from_ref(&next));
        assert_eq!(drafter.draft(&next), [2, 1], "another request's answer came late");
    }
}
