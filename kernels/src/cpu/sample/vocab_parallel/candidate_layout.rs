//! Layout of the 32-bit words that a rank sends for a logits row in vocab-parallel sampling. It depends only
//! on the sampling parameters of the row and on sizes that are equal on all ranks, so all ranks use one
//! layout without negotiation.

use crate::VocabShard;
use crate::cpu::sample::rules::{SampleOrScore, SampleRequest};

/// Number of candidate tokens that a rank sends for a row (1 KiB) if a filter (top-p, min-p) may keep any
/// number of tokens.
const CANDIDATES: usize = 128;
/// Minimum number of columns of the vocabulary shard per candidate token: in a small shard, at most one in
/// this many columns is sent as a candidate.
const IDS_PER_CANDIDATE: usize = 8;

/// Layout of the message (32-bit words) that a rank sends for a logits row: which data the message contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CandidateLayout {
    /// Number of candidate tokens that the rank sends.
    pub(super) candidates: usize,
    /// Whether the candidates are the most likely tokens of the shard in order, for a filter; otherwise the
    /// only candidate is the argmax of the shard.
    pub(super) is_top_k: bool,
    /// Whether the probability mass of the shard is sent, for top-p.
    pub(super) mass: bool,
    /// Whether the raw logits of the candidates are sent, for log-probabilities.
    pub(super) raw: bool,
    /// Number of most likely tokens under the raw logits that are sent; `None` = no log-probabilities are
    /// requested.
    pub(super) top: Option<usize>,
}

impl CandidateLayout {
    /// Returns the layout for a row; `None` if it has at least as many words as the shard has logits: then
    /// the whole row is gathered.
    pub(super) fn of(request: &SampleRequest<'_>, shard: &VocabShard) -> Option<Self> {
        let top = request.logprobs.map(|top| top.min(shard.cols));
        let plain = Self { candidates: 1, is_top_k: false, mass: false, raw: top.is_some(), top };
        let layout = match &request.choice {
            SampleOrScore::Score(_) => Self { raw: false, ..plain },
            SampleOrScore::Sample(rules) => match &rules.draw {
                Some(draw) if draw.top_k_of(shard.vocab).is_some() => {
                    Self { candidates: draw.top_k.min(shard.cols), is_top_k: true, ..plain }
                }
                Some(draw) if draw.filters() => {
                    let candidates = CANDIDATES.min(shard.cols / IDS_PER_CANDIDATE).max(1);
                    Self { candidates, is_top_k: true, mass: draw.top_p < 1.0, ..plain }
                }
                _ => plain,
            },
        };
        (layout.words() < shard.cols).then_some(layout)
    }

    /// Number of 32-bit words that a rank sends for the row.
    pub(super) fn words(&self) -> usize {
        let logprobs = self.top.map_or(0, |top| 3 + 2 * top);
        1 + self.candidates * self.candidate_words() + 2 * usize::from(self.mass) + logprobs
    }

    /// Number of 32-bit words per candidate.
    pub(super) fn candidate_words(&self) -> usize {
        2 + usize::from(self.raw)
    }
}
