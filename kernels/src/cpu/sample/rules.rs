//! What a device is asked about rows of logits: the rules of a token's choice, and the answers.
//!
//! Order everywhere: larger logit first, lower id first among equals. So all of min-p, top-k and
//! top-p cut the vocabulary at one place, and argmax, ranks and cuts agree with each other.

/// An id that occurred in the prompt or the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenOccurrence {
    /// The id.
    pub(crate) id: u32,
    /// Occurrences in the output; 0 = only in the prompt.
    pub(crate) count: u32,
}

/// Changes of single logits before the draw, in the order of the fields. Ids beyond the row have no logit and are passed over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LogitEdits<'a> {
    /// If present, every other id is masked.
    pub(crate) allowed: Option<&'a [u32]>,
    /// Masked ids.
    pub(crate) banned: &'a [u32],
    /// Added to single logits.
    pub(crate) bias: &'a [(u32, f32)],
    /// What the penalties count.
    pub(crate) seen: &'a [TokenOccurrence],
    /// Divides positive and multiplies negative logits of seen ids; 1 = off.
    pub(crate) repetition: f32,
    /// Subtracted per occurrence in the output.
    pub(crate) frequency: f32,
    /// Subtracted once for an occurrence in the output.
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
    /// Whether a logit may change at all.
    pub(crate) fn change_anything(&self) -> bool {
        self.allowed.is_some()
            || !(self.banned.is_empty() && self.bias.is_empty() && self.seen.is_empty())
    }
}

/// How a token is drawn from the edited logits: temperature, min-p, top-k, top-p, then the draw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DrawParams {
    /// Softmax temperature, at least `1e-5`.
    pub(crate) temperature: f32,
    /// Least probability, relative to the likeliest id; 0 = off.
    pub(crate) min_p: f32,
    /// Ids kept; 0 = all.
    pub(crate) top_k: usize,
    /// Probability kept; 1 = all.
    pub(crate) top_p: f32,
    /// Key of the request's noise.
    pub(crate) key: u64,
    /// Index of the token produced.
    pub(crate) position: u32,
}

impl DrawParams {
    /// The least logit that min-p keeps beside one of `best`.
    pub(crate) fn min_p_floor(&self, best: f32) -> f32 {
        match self.min_p {
            min_p if min_p > 0.0 => f32::MIN.max(best + min_p.min(1.0).ln()),
            _ => f32::MIN,
        }
    }

    /// How many ids top-k keeps of `vocab`, if not all.
    pub(crate) fn top_k_of(&self, vocab: usize) -> Option<usize> {
        (self.top_k > 0 && self.top_k < vocab).then_some(self.top_k)
    }

    /// Whether min-p or top-p may leave ids out.
    pub(crate) fn filters(&self) -> bool {
        self.min_p > 0.0 || self.top_p < 1.0
    }
}

/// Everything about the choice of one row's token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SamplingRules<'a> {
    /// Changes before the draw.
    pub(crate) edits: LogitEdits<'a>,
    /// The draw; `None` takes the likeliest id.
    pub(crate) draw: Option<DrawParams>,
}

/// Log-probabilities under the raw logits.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RowLogprobs {
    /// Of the id asked for.
    pub(crate) logprob: f32,
    /// Its place among all ids, from 1.
    pub(crate) rank: u32,
    /// The likeliest ids in order.
    pub(crate) top: Vec<(u32, f32)>,
}

/// Why a row yields no token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SampleError {
    /// A logit is NaN or infinite.
    NonFinite,
    /// The rules mask every id.
    AllMasked,
}

/// What is asked about one row of logits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SampleRequest<'a> {
    /// Which token it is about.
    pub(crate) pick: TokenChoice<'a>,
    /// Log-probabilities to report beside the token's own; `None` = none at all.
    pub(crate) logprobs: Option<usize>,
}

/// The token of a row.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TokenChoice<'a> {
    /// To be chosen.
    Sample(SamplingRules<'a>),
    /// Known: only its log-probability is wanted.
    Known(u32),
}

/// The answer about one row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SampledRow {
    /// The token.
    pub(crate) token: u32,
    /// If asked for.
    pub(crate) logprobs: Option<RowLogprobs>,
}

/// One answer per row: a strange row fails alone.
pub(crate) type RowSampleResult = Result<SampledRow, SampleError>;
