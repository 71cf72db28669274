//! The "language" of the hash model: formulas for the contents of a KV entry and for the next token after a
//! prefix.
//!
//! The file contains formulas only, so that the simulated device and the oracle cannot differ by accident.
//! The device reads contexts through block tables; the oracle folds a request's own token ids.
//!
//! A KV entry represents the keys and values of one position in a causal model: it depends on the token id at
//! that position and on all earlier ids. A context is the fold of all entries before a position, so a wrong,
//! stale, shared or missing entry changes every later token.

use protocol::{PoolingMethod, SamplingParams, Token, TokenLogprobs};
use std::ops::Range;

/// Content of a KV slot that must not be read: the slot was never written, was freed, or was written by a
/// failed row.
pub(crate) const POISON: u64 = 0xdead_beef_dead_beef;

/// Context (hash of all KV entries so far) before the first position.
pub(crate) const EMPTY: u64 = 0x9e37_79b9_7f4a_7c15;

/// Finaliser of splitmix64: every input bit reaches every output bit.
pub(crate) fn avalanche(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Context after a KV entry, given the context before it. The order of entries matters.
pub(crate) fn fold(context: u64, entry: u64) -> u64 {
    (context ^ entry).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29)
}

/// KV entry of `token` at a position with `context` before it.
pub(crate) fn entry(context: u64, token: Token) -> u64 {
    avalanche(context.wrapping_add(u64::from(token).wrapping_mul(0xd6e8_feb8_6659_fd93)))
}

/// Sampler of the hash model for one sequence slot: all state except the context that affects the next
/// token.
#[derive(Debug, Clone)]
pub(crate) struct HashSampler {
    /// Vocabulary size; token ids are in `0 .. vocab`.
    pub(crate) vocab: Token,
    /// The request's sampling parameters. Only `min_tokens`, `stop_token_ids`, `allowed_token_ids`, the
    /// temperature and the token history have an effect.
    pub(crate) sampling: SamplingParams,
    /// Key of the sampling noise; has an effect only if the temperature is not 0.
    pub(crate) key: u64,
    /// Prompt length; later positions are output.
    pub(crate) prompt_len: u32,
    /// Fold of all token ids so far, if a sampling parameter needs the token history; otherwise unused.
    pub(crate) history: u64,
}

impl HashSampler {
    /// A sampler with an empty token history.
    pub(crate) fn new(vocab: Token, sampling: SamplingParams, key: u64, prompt_len: u32) -> Self {
        Self { vocab, sampling, key, prompt_len, history: EMPTY }
    }

    /// Adds ids to the token history that penalties use.
    pub(crate) fn observe(&mut self, ids: &[Token]) {
        if self.sampling.needs_token_history() {
            for &id in ids {
                self.history = fold(self.history, u64::from(id) + 1);
            }
        }
    }

    /// The token sampled at `position` after `context`, restricted by `mask` if there is one; `None` if no id
    /// is allowed.
    pub(crate) fn next(&self, context: u64, position: u32, mask: Option<&[u32]>) -> Option<Token> {
        let mut x = context;
        if self.sampling.temperature >= 1e-5 {
            x = avalanche(x ^ avalanche(self.key ^ u64::from(position)));
        }
        if self.sampling.needs_token_history() {
            x = avalanche(x ^ self.history);
        }
        let masked = position < self.prompt_len.saturating_add(self.sampling.min_tokens);
        let unmasked = self.unmasked_token(x, masked);
        let Some(mask) = mask else { return unmasked };
        // A mask that allows the token has no effect, as for any sampler.
        if let Some(token) = unmasked.filter(|&id| allows(mask, id)) {
            return Some(token);
        }
        let own = |id: &Token| {
            self.sampling.allowed_token_ids.as_ref().is_none_or(|ids| ids.contains(id))
        };
        let ends = |id: &Token| masked && self.sampling.stop_token_ids.contains(id);
        let fits = |id: &Token| allows(mask, *id) && own(id) && !ends(id);
        let ids: Vec<Token> = (0..self.vocab).filter(fits).collect();
        ids.get((avalanche(x) % ids.len().max(1) as u64) as usize).copied()
    }

    /// The token sampled with random word `x` and without a mask. `masked`: stop tokens are not allowed.
    fn unmasked_token(&self, mut x: u64, masked: bool) -> Option<Token> {
        (1..=64).find_map(|attempt| {
            x = avalanche(x.wrapping_add(attempt));
            let token = match &self.sampling.allowed_token_ids {
                Some(ids) => *ids.get((x % ids.len().max(1) as u64) as usize)?,
                None => (x % u64::from(self.vocab)) as Token,
            };
            (!masked || !self.sampling.stop_token_ids.contains(&token)).then_some(token)
        })
    }
}

/// Whether a grammar bitmask allows a token id.
pub(crate) fn allows(mask: &[u32], id: Token) -> bool {
    mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
}

/// Log-probability of `token` after `context`, and those of `top` alternatives.
pub(crate) fn logprobs(context: u64, token: Token, top: u32, vocab: Token) -> TokenLogprobs {
    let of = |id: Token| -((entry(context, id) >> 40) as f32 / 65_536.0);
    TokenLogprobs {
        token,
        logprob: of(token),
        rank: 1 + (entry(context, token) % u64::from(vocab)) as u32,
        top_logprobs: (0..top.min(vocab)).map(|id| (id, of(id))).collect(),
    }
}

/// Number of channels of a pooled hidden state.
pub(crate) const POOLED_WIDTH: usize = 8;

/// The `count` numbers, each from -1 to 1, that pooling gives for this hash of the prompt.
pub(crate) fn pooled(hash: u64, count: usize) -> Vec<f32> {
    let number = |i| (avalanche(hash ^ i) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    (1..=count as u64).map(number).collect()
}

/// Hash of a prompt for a pooling method: of its last context, or of the contexts after all of its tokens.
pub(crate) fn pooling_hash(method: &PoolingMethod, tokens: &[Token]) -> u64 {
    let (mut context, mut sum) = (EMPTY, 0u64);
    for &id in tokens {
        context = fold(context, entry(context, id));
        sum = sum.wrapping_add(avalanche(context));
    }
    if method.reads_every_token() { sum } else { context }
}

/// Number of values that a pooling method returns.
pub(crate) fn pooled_count(method: &PoolingMethod) -> usize {
    match method {
        PoolingMethod::TokenLogprobs(ids) => ids.len(),
        PoolingMethod::ClassLogits => 1,
        PoolingMethod::LastToken | PoolingMethod::Mean => POOLED_WIDTH,
    }
}

/// Grammar of a constrained request, different for each key. About a third of the ids may follow, and which
/// ones depends on every earlier id, so that a bitmask built too early, too late or for another request
/// allows wrong ids.
#[derive(Debug, Clone)]
pub(crate) struct HashGrammar {
    state: u64,
    vocab: Token,
}

impl HashGrammar {
    /// The grammar of `key` before any output token.
    pub(crate) fn new(key: u64, vocab: Token) -> Self {
        Self { state: avalanche(key ^ EMPTY), vocab }
    }

    /// Advances the grammar by one output token.
    pub(crate) fn observe(&mut self, id: Token) {
        self.state = fold(self.state, u64::from(id) + 1);
    }

    /// Bitmask of the ids that may follow; at least one bit is set.
    pub(crate) fn mask(&self) -> Vec<u32> {
        let mut words = vec![0; self.vocab.div_ceil(32) as usize];
        let sure = (avalanche(self.state) % u64::from(self.vocab)) as Token;
        for id in 0..self.vocab {
            if id == sure || avalanche(self.state ^ u64::from(id)).is_multiple_of(3) {
                words[id as usize / 32] |= 1 << (id % 32);
            }
        }
        words
    }
}

/// The oracle: computes the output that a request has when it runs alone with an empty cache, from its own
/// ids.
#[derive(Debug, Clone)]
pub(crate) struct HashOracle {
    context: u64,
    position: u32,
    sampler: HashSampler,
    grammar: Option<HashGrammar>,
    /// Range of output tokens that the grammar restricts.
    masked: Range<u32>,
}

impl HashOracle {
    /// An oracle that has read `prompt`, without a grammar.
    pub(crate) fn new(mut sampler: HashSampler, prompt: &[Token]) -> Self {
        sampler.observe(prompt);
        let context = prompt.iter().fold(EMPTY, |c, &id| fold(c, entry(c, id)));
        Self { context, position: prompt.len() as u32, sampler, grammar: None, masked: 0..0 }
    }

    /// An oracle for a constrained request: the grammar of its sampler key restricts the output tokens
    /// `masked`.
    pub(crate) fn constrained(sampler: HashSampler, prompt: &[Token], masked: Range<u32>) -> Self {
        let grammar = Some(HashGrammar::new(sampler.key, sampler.vocab));
        Self { grammar, masked, ..Self::new(sampler, prompt) }
    }

    /// The context before the next token.
    pub(crate) fn context(&self) -> u64 {
        self.context
    }
}

impl Iterator for HashOracle {
    type Item = Token;

    /// Samples the next token; `None` if no id is allowed.
    fn next(&mut self) -> Option<Token> {
        let outputs = self.position - self.sampler.prompt_len;
        let grammar = self.grammar.as_ref().filter(|_| self.masked.contains(&outputs));
        let mask = grammar.map(HashGrammar::mask);
        let token = self.sampler.next(self.context, self.position, mask.as_deref())?;
        self.grammar.iter_mut().for_each(|grammar| grammar.observe(token));
        self.context = fold(self.context, entry(self.context, token));
        self.position += 1;
        self.sampler.observe(&[token]);
        Some(token)
    }
}
