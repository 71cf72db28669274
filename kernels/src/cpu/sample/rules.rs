//! Sampling requests for logits rows: rules, and results.
//!
//! Order of ids everywhere: larger logit first, lower id first among equals. So min-p, top-k and top-p all
//! cut the vocabulary at one place in that order, and argmax, ranks and cutoffs are consistent.

/// A token id that occurs in the prompt or the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenOccurrence {
    /// Token id.
    pub(crate) id: u32,
    /// Number of occurrences in the output; 0 = prompt only.
    pub(crate) count: u32,
}

/// Edits of single logits before sampling, applied in the order of the fields. Ids outside the row are
/// ignored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LogitEdits<'a> {
    /// If present, all other ids are masked.
    pub(crate) allowed: Option<&'a [u32]>,
    /// Masked ids.
    pub(crate) banned: &'a [u32],
    /// Values added to single logits.
    pub(crate) bias: &'a [(u32, f32)],
    /// Occurrences of token ids that the penalties read.
    pub(crate) seen: &'a [TokenOccurrence],
    /// Repetition penalty: divides positive and multiplies negative logits of seen ids; 1 = off.
    pub(crate) repetition: f32,
    /// Frequency penalty, subtracted per occurrence in the output.
    pub(crate) frequency: f32,
    /// Presence penalty, subtracted once if the id occurs in the output.
    pub(crate) presence: f32,
}

impl Default for LogitEdits<'_> {
    fn default() -> Self {
        Self {
            allowed: None,
            banned: &[],
            bias: &[],
            seen: &[],
            repetition: 1.0,
            frequency: 0.0,
            presence: 0.0,
        }
    }
}

impl LogitEdits<'_> {
    /// Whether any logit may change.
    pub(crate) fn change_anything(&self) -> bool {
        self.allowed.is_some()
            || !(self.banned.is_empty() && self.bias.is_empty() && self.seen.is_empty())
    }
}

/// Parameters of random sampling from the edited logits, applied in this order: temperature, min-p, top-k,
/// top-p, then Gumbel noise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DrawParams {
    /// Softmax temperature; at least `1e-5`.
    pub(crate) temperature: f32,
    /// Min-p: minimum probability relative to the most likely id; 0 = off.
    pub(crate) min_p: f32,
    /// Top-k: number of ids kept; 0 = off.
    pub(crate) top_k: usize,
    /// Top-p: cumulative probability kept; 1 = off.
    pub(crate) top_p: f32,
    /// Philox key of the request.
    pub(crate) key: u64,
    /// Sample position.
    pub(crate) position: u32,
}

impl DrawParams {
    /// Smallest logit that min-p keeps if the largest logit is `best`.
    pub(crate) fn min_p_floor(&self, best: f32) -> f32 {
        match self.min_p {
            min_p if min_p > 0.0 => f32::MIN.max(best + min_p.min(1.0).ln()),
            _ => f32::MIN,
        }
    }

    /// Number of ids of `vocab` that top-k keeps; `None` = all.
    pub(crate) fn top_k_of(&self, vocab: usize) -> Option<usize> {
        (self.top_k > 0 && self.top_k < vocab).then_some(self.top_k)
    }

    /// Whether min-p or top-p may remove ids.
    pub(crate) fn filters(&self) -> bool {
        self.min_p > 0.0 || self.top_p < 1.0
    }
}

/// Sampling rules of one row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SamplingRules<'a> {
    /// Logit edits before sampling.
    pub(crate) edits: LogitEdits<'a>,
    /// Parameters of random sampling; `None` = greedy.
    pub(crate) draw: Option<DrawParams>,
}

/// Log-probabilities under the raw logits.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RowLogprobs {
    /// Log-probability of the token.
    pub(crate) logprob: f32,
    /// Rank of the token among all ids, from 1.
    pub(crate) rank: u32,
    /// Top ids in order, with their log-probabilities.
    pub(crate) top: Vec<(u32, f32)>,
}

/// Reason why a row yields no token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SampleError {
    /// A logit is NaN or infinite.
    NonFinite,
    /// The rules mask every id.
    AllMasked,
}

/// Sampling request for one row of logits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SampleRequest<'a> {
    /// Token to sample, or to score.
    pub(crate) choice: TokenChoice<'a>,
    /// Number of top log-probabilities to report in addition to that of the token; `None` = no
    /// log-probabilities.
    pub(crate) logprobs: Option<usize>,
}

/// Choice of the token of a row: sampled, or given and scored.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TokenChoice<'a> {
    /// Sample a token.
    Sample(SamplingRules<'a>),
    /// Score a known token: only its log-probability is requested.
    Score(u32),
}

/// Result of one row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SampledRow {
    /// Sampled or scored token.
    pub(crate) token: u32,
    /// Log-probabilities, if requested.
    pub(crate) logprobs: Option<RowLogprobs>,
}

/// Result of one row: an error affects its row only.
pub(crate) type RowSampleResult = Result<SampledRow, SampleError>;
