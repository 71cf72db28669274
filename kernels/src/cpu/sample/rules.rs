//! Inputs and outputs of the CPU sampler for one logits row: sampling parameters, logit edits, and the
//! sampled token.
//!
//! Tokens are everywhere ordered by logit, larger first, then by id, lower first. So min-p, top-k and top-p
//! each keep a prefix of that order, and argmax, ranks and cutoffs are consistent.

/// A token id that occurs in the prompt or the output; penalties apply to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenOccurrence {
    /// Token id.
    pub(crate) id: u32,
    /// Number of occurrences in the output; 0 = prompt only.
    pub(crate) count: u32,
}

/// Edits of single logits before sampling, applied in the order of the fields. Token ids outside the row are
/// ignored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LogitEdits<'a> {
    /// Token ids that a grammar bitmask allows: all other ids are masked. `None` = all ids are allowed.
    pub(crate) allowed: Option<&'a [u32]>,
    /// Token ids that are masked (logit −∞).
    pub(crate) banned: &'a [u32],
    /// Logit bias: token ids and the values added to their logits.
    pub(crate) bias: &'a [(u32, f32)],
    /// Tokens of the prompt and the output, to which the penalties apply.
    pub(crate) seen: &'a [TokenOccurrence],
    /// Repetition penalty: positive logits of the tokens in `seen` are divided by it, negative logits
    /// multiplied; 1 = off.
    pub(crate) repetition: f32,
    /// Frequency penalty: subtracted from the logit of a token for each of its occurrences in the output.
    pub(crate) frequency: f32,
    /// Presence penalty: subtracted once from the logit of a token that occurs in the output.
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
    /// Whether these logit edits (bias, penalties, bans) may change a logit.
    pub(crate) fn change_anything(&self) -> bool {
        self.allowed.is_some()
            || !(self.banned.is_empty() && self.bias.is_empty() && self.seen.is_empty())
    }
}

/// Parameters of random sampling from the edited logits, applied in this order: temperature, min-p, top-k,
/// top-p, then Gumbel noise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RandomSamplingParams {
    /// Softmax temperature; at least `1e-5`.
    pub(crate) temperature: f32,
    /// Min-p: minimum probability relative to that of the most likely token; 0 = off.
    pub(crate) min_p: f32,
    /// Top-k: number of most likely tokens that are kept; 0 = off.
    pub(crate) top_k: usize,
    /// Top-p: cumulative probability of the tokens that are kept; 1 = off.
    pub(crate) top_p: f32,
    /// Philox key of the request: the seed of its random numbers.
    pub(crate) key: u64,
    /// Position of the token to sample.
    pub(crate) position: u32,
}

impl RandomSamplingParams {
    /// Smallest logit that min-p keeps if the largest logit is `best`.
    pub(crate) fn min_p_floor(&self, best: f32) -> f32 {
        match self.min_p {
            min_p if min_p > 0.0 => f32::MIN.max(best + min_p.min(1.0).ln()),
            _ => f32::MIN,
        }
    }

    /// Number of tokens that top-k keeps of a vocabulary of `vocab` tokens; `None` = all.
    pub(crate) fn top_k_of(&self, vocab: usize) -> Option<usize> {
        (self.top_k > 0 && self.top_k < vocab).then_some(self.top_k)
    }

    /// Whether min-p or top-p may remove tokens.
    pub(crate) fn filters(&self) -> bool {
        self.min_p > 0.0 || self.top_p < 1.0
    }
}

/// Logit edits and sampling parameters of one logits row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SamplingRules<'a> {
    /// Logit edits before sampling.
    pub(crate) edits: LogitEdits<'a>,
    /// Parameters of random sampling; `None` = greedy.
    pub(crate) draw: Option<RandomSamplingParams>,
}

/// Log-probabilities of one row, computed from the logits before edits and temperature.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RowLogprobs {
    /// Log-probability of the sampled or scored token.
    pub(crate) logprob: f32,
    /// Rank of the sampled or scored token among all token ids, from 1.
    pub(crate) rank: u32,
    /// The most likely tokens in order, with their log-probabilities.
    pub(crate) top: Vec<(u32, f32)>,
}

/// Reason why no token can be sampled from a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SampleError {
    /// A logit of the row is NaN or infinite.
    NonFinite,
    /// The logit edits mask every token id.
    AllMasked,
}

/// Sampling request for one row of logits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SampleRequest<'a> {
    /// Whether to sample a token or to score a given one.
    pub(crate) choice: SampleOrScore<'a>,
    /// Number of top log-probabilities to report in addition to that of the token; `None` = no
    /// log-probabilities.
    pub(crate) logprobs: Option<usize>,
}

/// How the token of a row is chosen: it is sampled, or it is given and only scored.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SampleOrScore<'a> {
    /// A token is sampled with these logit edits and sampling parameters.
    Sample(SamplingRules<'a>),
    /// The token is known, and only its log-probability is requested.
    Score(u32),
}

/// Sampled or scored token of one row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SampledRow {
    /// Sampled or scored token.
    pub(crate) token: u32,
    /// Log-probabilities, if requested.
    pub(crate) logprobs: Option<RowLogprobs>,
}

/// Result for one row; an error affects its row only.
pub(crate) type RowSampleResult = Result<SampledRow, SampleError>;
