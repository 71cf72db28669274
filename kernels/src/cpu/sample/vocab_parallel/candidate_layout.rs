//! How much a rank says about a row. The rules of the row decide it, so that all ranks agree unasked.

use crate::VocabShard;
use crate::cpu::sample::rules::{SampleRequest, TokenChoice};

/// Ids that a rank names where nobody knows beforehand how many a rule keeps: 1 KiB.
const CANDIDATES: usize = 128;
/// Of a small part at most one id in so many.
const IDS_PER_CANDIDATE: usize = 8;

/// What a rank says about a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CandidateLayout {
    /// Ids that it names.
    pub(super) candidates: usize,
    /// Whether they are the likeliest ones in order, for a rule that cuts; otherwise it is the one that wins on this rank.
    pub(super) ordered: bool,
    /// Whether it tells the mass of all its ids.
    pub(super) mass: bool,
    /// Whether it tells the raw logits of the ids that it names.
    pub(super) raw: bool,
    /// Likeliest ids under the raw logits; `None` = no log-probabilities.
    pub(super) top: Option<usize>,
}

impl CandidateLayout {
    /// `None` = as much as the logits themselves: then they are what a rank brings.
    pub(super) fn of(row: &SampleRequest<'_>, part: &VocabShard) -> Option<Self> {
        let top = row.logprobs.map(|top| top.min(part.cols));
        let plain = Self { candidates: 1, ordered: false, mass: false, raw: top.is_some(), top };
        let shape = match &row.pick {
            TokenChoice::Known(_) => Self { raw: false, ..plain },
            TokenChoice::Sample(rules) => match &rules.draw {
                Some(draw) if draw.top_k_of(part.vocab).is_some() => {
                    Self { candidates: draw.top_k.min(part.cols), ordered: true, ..plain }
                }
                Some(draw) if draw.filters() => {
                    let candidates = CANDIDATES.min(part.cols / IDS_PER_CANDIDATE).max(1);
                    Self { candidates, ordered: true, mass: draw.top_p < 1.0, ..plain }
                }
                _ => plain,
            },
        };
        (shape.words() < part.cols).then_some(shape)
    }

    /// Words of four bytes.
    pub(super) fn words(&self) -> usize {
        let report = self.top.map_or(0, |top| 3 + 2 * top);
        1 + self.candidates * self.candidate_words() + 2 * usize::from(self.mass) + report
    }

    /// Words of a candidate.
    pub(super) fn candidate_words(&self) -> usize {
        2 + usize::from(self.raw)
    }
}
