//! One output as its grammar sees it: committed tokens in, masks out.

use super::compile::CompiledGrammar;
use super::matcher_copies::MatcherCopy;
use llguidance::{CancellationHandle, Matcher};
use protocol::Token;
use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

/// What the session of one output begins with. It shares the grammar until then: a request that waits has no copy.
#[derive(Clone)]
pub struct SessionSeed {
    compiled: CompiledGrammar,
    /// The copy that the choices of one request share: what they find out about the grammar they find out once.
    copy: Arc<OnceLock<MatcherCopy>>,
    ignores_end: bool,
}

impl SessionSeed {
    pub(super) fn new(compiled: CompiledGrammar, ignores_end: bool) -> Self {
        Self { compiled, copy: Arc::default(), ignores_end }
    }

    /// Whether masks of this grammar are known to be slow: what one request finds out holds for the next ones.
    pub(super) fn is_slow(&self) -> &Arc<AtomicBool> {
        &self.compiled.is_slow
    }

    /// Follows an output from its first token.
    pub fn session(&self) -> GrammarSession {
        let matcher = self.copy.get_or_init(|| self.compiled.matcher_copy()).matcher.clone();
        let session =
            GrammarSession::new(matcher, Arc::clone(self.compiled.end_ids()), self.ignores_end);
        GrammarSession { _copy: Some(Arc::clone(&self.copy)), ..session }
    }
}

impl std::fmt::Debug for SessionSeed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seed").field("compiled", &self.compiled).finish_non_exhaustive()
    }
}

/// Where one output stands in its grammar.
pub struct GrammarSession {
    matcher: Matcher,
    end_ids: Arc<[Token]>,
    ignores_end: bool,
    /// Ids that must come next, one after the other. A text without a choice in it is spelled once, not anew for
    /// each of its tokens.
    forced: VecDeque<Token>,
    /// Counted as long as this lives.
    _copy: Option<Arc<OnceLock<MatcherCopy>>>,
}

impl GrammarSession {
    pub(super) fn new(matcher: Matcher, ends: Arc<[Token]>, ignores_end: bool) -> Self {
        let matcher = matcher.into_cancellable();
        Self { matcher, end_ids: ends, ignores_end, forced: VecDeque::new(), _copy: None }
    }

    /// What makes it give up, for good, whatever it is doing.
    pub(super) fn cancellation_handle(&self) -> CancellationHandle {
        self.matcher.cancellation_handle().unwrap_or_default()
    }

    /// Follows committed tokens. What the grammar does not know is found out by the next mask.
    pub fn advance(&mut self, tokens: &[Token]) {
        for token in tokens {
            if self.forced.pop_front() != Some(*token) {
                self.forced.clear();
            }
        }
        if let Err(error) = self.matcher.consume_tokens(tokens) {
            tracing::warn!(%error, "a token left the grammar");
            self.forced.clear();
        }
    }

    /// One bit for each id that may come next, id `i` in bit `i % 32` of word `i / 32`; a token that ends the
    /// text is among them where the text may end here.
    ///
    /// `None` = the grammar cannot be followed any further: it costs more than it may, or nothing is allowed.
    pub fn mask(&mut self) -> Option<Vec<u32>> {
        match self.try_mask() {
            Ok(words) => words.iter().any(|&word| word != 0).then_some(words),
            Err(error) => {
                tracing::warn!(%error, "no mask");
                None
            }
        }
    }

    /// The same; errors say why there is none.
    pub(super) fn try_mask(&mut self) -> anyhow::Result<Vec<u32>> {
        if self.forced.is_empty() && !self.matcher.is_stopped() {
            self.forced = self.matcher.compute_ff_tokens().into();
        }
        let env = self.matcher.tok_env()?;
        if let Some(&next) = self.forced.front() {
            return Ok(env.tok_trie().singleton_token_set(next).as_slice().to_vec());
        }
        let mut words = self.matcher.compute_mask_or_eos()?.as_slice().to_vec();
        if self.ignores_end {
            let mut others = words.clone();
            for &id in &*self.end_ids {
                if let Some(word) = others.get_mut(id as usize / 32) {
                    *word &= !(1 << (id % 32));
                }
            }
            if others.iter().any(|&word| word != 0) {
                words = others;
            }
        }
        Ok(words)
    }

    /// One of the allowed ids that do not end the text, chosen by `pick`.
    pub(super) fn pick(&self, mask: &[u32], pick: u32) -> Option<Token> {
        let words = (0..).step_by(32).zip(mask);
        let bits = words.flat_map(|(first, word): (Token, &u32)| {
            (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| first + bit)
        });
        let allowed: Vec<Token> = bits.filter(|id| !self.end_ids.contains(id)).collect();
        allowed.get(pick as usize % allowed.len().max(1)).copied()
    }

    /// Whether the text is over: nothing but its end may come.
    pub(super) fn is_finished(&self) -> bool {
        self.matcher.is_stopped()
    }

    /// Whether the text may end here.
    pub fn may_end(&mut self) -> bool {
        self.matcher.is_stopped() || self.matcher.is_accepting().unwrap_or(false)
    }
}

impl std::fmt::Debug for GrammarSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("ignores_end", &self.ignores_end).finish_non_exhaustive()
    }
}
