//! Formulas of the hash model, a simulated language model: contents of a KV entry, and next token after a
//! prefix.
//!
//! The simulated device and the oracle (which computes the expected output) share these formulas, so that
//! they cannot differ by accident. The device reads KV entries through block tables; the oracle computes them
//! from the token ids of the request.
//!
//! A KV entry represents the keys and values of one position in a causal model: it depends on the token id at
//! the position and on all earlier ids. A context is a hash of all KV entries before a position, so a wrong,
//! stale, shared or missing KV entry changes every later token.

use protocol::{PoolingMethod, SamplingParams, Token, TokenLogprobs};
use std::ops::Range;

/// Content of a KV slot (the memory of one KV entry) that must not be read, because it was never written, was
/// freed, or was written by a failed row.
pub(crate) const POISON: u64 = 0xdead_beef_dead_beef;

/// Context (hash of all earlier KV entries) at the first position.
pub(crate) const EMPTY: u64 = 0x9e37_79b9_7f4a_7c15;

/// Finaliser of splitmix64: every input bit reaches every output bit.
pub(crate) fn avalanche(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns the context (hash of KV entries) after a KV entry, given the context before it. The order of the
/// entries matters.
pub(crate) fn fold(context: u64, entry: u64) -> u64 {
    (context ^ entry).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29)
}

/// Returns the KV entry of `token`, given the context (hash of all earlier KV entries).
pub(crate) fn entry(context: u64, token: Token) -> u64 {
    avalanche(context.wrapping_add(u64::from(token).wrapping_mul(0xd6e8_feb8_6659_fd93)))
}

/// Sampler of the hash model for one sequence slot. It has all state on which the next token depends, except
/// the context (hash of all earlier KV entries).
#[derive(Debug, Clone)]
pub(crate) struct HashSampler {
    /// Vocabulary size; token ids are in `0 .. vocab`.
    pub(crate) vocab: Token,
    /// The request's sampling parameters. Only `min_tokens`, `stop_token_ids`, `allowed_token_ids`, the
    /// temperature and the token history have an effect.
    pub(crate) sampling: SamplingParams,
    /// Seed of the random sampling; has an effect only if the temperature is not 0.
    pub(crate) key: u64,
    /// Prompt length; tokens at later positions are output tokens.
    pub(crate) prompt_len: u32,
    /// Hash of all token ids so far, if a sampling parameter (such as a penalty) depends on them; otherwise
    /// unused.
    pub(crate) history: u64,
}

impl HashSampler {
    /// A sampler with an empty token history.
    pub(crate) fn new(vocab: Token, sampling: SamplingParams, key: u64, prompt_len: u32) -> Self {
        Self { vocab, sampling, key, prompt_len, history: EMPTY }
    }

    /// Adds ids to the token history, if a sampling parameter (such as a penalty) depends on it.
    pub(crate) fn observe(&mut self, ids: &[Token]) {
        if self.sampling.needs_token_history() {
            for &id in ids {
                self.history = fold(self.history, u64::from(id) + 1);
            }
        }
    }

    /// Samples the token at `position`, given the context (hash of all earlier KV entries) and the grammar
    /// bitmask `mask`, if there is one. Returns `None` if no id is allowed.
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
        // If the mask allows the token that is sampled without a mask, the mask has no effect, as for any
        // sampler.
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

    /// Samples a token with the random number `x`, without a grammar bitmask. If `masked`, stop tokens are
    /// not allowed (`min_tokens` is not reached).
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

/// Returns the log-probability of `token` after `context` (hash of all earlier KV entries), and the
/// log-probabilities of `top` other ids.
pub(crate) fn logprobs(context: u64, token: Token, top: u32, vocab: Token) -> TokenLogprobs {
    let of = |id: Token| -((entry(context, id) >> 40) as f32 / 65_536.0);
    TokenLogprobs {
        token,
        logprob: of(token),
        rank: 1 + (entry(context, token) % u64::from(vocab)) as u32,
        top_logprobs: (0..top.min(vocab)).map(|id| (id, of(id))).collect(),
    }
}

/// Number of values of a simulated pooled hidden state (embedding).
pub(crate) const POOLED_WIDTH: usize = 8;

/// Returns `count` numbers from -1 to 1: the result of pooling for a prompt with this `pooling_hash`.
pub(crate) fn pooled(hash: u64, count: usize) -> Vec<f32> {
    let number = |i| (avalanche(hash ^ i) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    (1..=count as u64).map(number).collect()
}

/// Returns a hash of the prompt from which the result of pooling is computed: the last context (hash of KV
/// entries), or for methods that read every token, the sum of the hashes of all contexts.
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

/// Simulated grammar of a constrained request, different for each key. It allows about a third of the token
/// ids at each position, depending on all earlier output ids. A bitmask that is built too early, too late or
/// for another request therefore allows wrong ids.
#[derive(Debug, Clone)]
pub(crate) struct HashGrammar {
    state: u64,
    vocab: Token,
}

impl HashGrammar {
    /// Creates the grammar of `key`, in its state before the first output token.
    pub(crate) fn new(key: u64, vocab: Token) -> Self {
        Self { state: avalanche(key ^ EMPTY), vocab }
    }

    /// Advances the grammar by one output token.
    pub(crate) fn observe(&mut self, id: Token) {
        self.state = fold(self.state, u64::from(id) + 1);
    }

    /// Returns the bitmask of the ids that are allowed next; at least one bit is set.
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

/// The oracle: computes the expected output of a request, which is its output if it runs alone with an empty
/// cache.
#[derive(Debug, Clone)]
pub(crate) struct HashOracle {
    context: u64,
    position: u32,
    sampler: HashSampler,
    grammar: Option<HashGrammar>,
    /// Indices of the output tokens that the grammar restricts.
    masked: Range<u32>,
}

impl HashOracle {
    /// An oracle for a request with the prompt `prompt` and without a grammar.
    pub(crate) fn new(mut sampler: HashSampler, prompt: &[Token]) -> Self {
        sampler.observe(prompt);
        let context = prompt.iter().fold(EMPTY, |c, &id| fold(c, entry(c, id)));
        Self { context, position: prompt.len() as u32, sampler, grammar: None, masked: 0..0 }
    }

    /// An oracle for a constrained request. The grammar is derived from the sampler's key, and restricts the
    /// output tokens with the indices `masked`.
    pub(crate) fn constrained(sampler: HashSampler, prompt: &[Token], masked: Range<u32>) -> Self {
        let grammar = Some(HashGrammar::new(sampler.key, sampler.vocab));
        Self { grammar, masked, ..Self::new(sampler, prompt) }
    }

    /// Returns the context (hash of all KV entries so far) from which the next token is sampled.
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
