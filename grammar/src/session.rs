//! Grammar session: parser state of one output. It receives committed tokens and computes the token bitmask
//! (mask) of the next token.

use super::compile::CompiledGrammar;
use super::matcher_copies::MatcherCopy;
use llguidance::{CancellationHandle, Matcher};
use protocol::Token;
use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

/// Factory of the grammar sessions (parser states) of one request, one session per choice. Until the first
/// session is created, the factory only refers to the compiled grammar, so that a waiting request needs no
/// copy of the llguidance matcher.
#[derive(Clone)]
pub struct GrammarSessionFactory {
    compiled: CompiledGrammar,
    /// Copy of the llguidance matcher that the choices of one request share, so that lexer states are
    /// computed once for all choices.
    copy: Arc<OnceLock<MatcherCopy>>,
    ignores_end: bool,
}

impl GrammarSessionFactory {
    pub(super) fn new(compiled: CompiledGrammar, ignores_end: bool) -> Self {
        Self { compiled, copy: Arc::default(), ignores_end }
    }

    /// Returns the flag that is set while the grammar's token bitmasks are slow to compute. All requests
    /// with this grammar share the flag.
    pub(super) fn is_slow(&self) -> &Arc<AtomicBool> {
        &self.compiled.is_slow
    }

    /// Creates a session for an output before its first token.
    pub fn session(&self) -> GrammarSession {
        let matcher = self.copy.get_or_init(|| self.compiled.matcher_copy()).matcher.clone();
        let session =
            GrammarSession::new(matcher, Arc::clone(self.compiled.end_ids()), self.ignores_end);
        GrammarSession { copy: Some(Arc::clone(&self.copy)), ..session }
    }
}

impl std::fmt::Debug for GrammarSessionFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarSessionFactory")
            .field("compiled", &self.compiled)
            .finish_non_exhaustive()
    }
}

/// Parser state of one output, from which the token bitmask of the next token is computed.
pub struct GrammarSession {
    matcher: Matcher,
    end_ids: Arc<[Token]>,
    ignores_end: bool,
    /// Token ids that the grammar forces next, in order. Forced text is tokenized once as a whole, not again
    /// for each of its tokens.
    forced: VecDeque<Token>,
    /// Committed tokens, which are replayed on a new matcher if the current one cannot be rolled back.
    committed: Vec<Token>,
    /// Whether the session can follow draft tokens; false after a rollback has failed.
    follows_drafts: bool,
    /// Reference to the request's matcher copy, so that the size of the copy is counted until the session
    /// ends.
    copy: Option<Arc<OnceLock<MatcherCopy>>>,
}

/// State of a grammar session before it follows draft tokens, used to restore that state.
pub(super) struct SessionSnapshot {
    forced: VecDeque<Token>,
    /// Number of draft tokens by which the matcher has been advanced so far.
    followed: usize,
}

impl GrammarSession {
    pub(super) fn new(matcher: Matcher, end_ids: Arc<[Token]>, ignores_end: bool) -> Self {
        let matcher = matcher.into_cancellable();
        Self {
            matcher,
            end_ids,
            ignores_end,
            forced: VecDeque::new(),
            committed: Vec::new(),
            follows_drafts: true,
            copy: None,
        }
    }

    /// Returns a handle that permanently cancels all computations of the session.
    pub(super) fn cancellation_handle(&self) -> CancellationHandle {
        self.matcher.cancellation_handle().unwrap_or_default()
    }

    /// Advances by committed tokens. A token that violates the grammar makes the next mask fail.
    ///
    /// Before each token except the first, the tokens that the grammar forces are computed, because the
    /// computation of the mask for this position would also have computed them. As a result, forced text is
    /// tokenized in the same way with and without draft tokens.
    pub fn advance(&mut self, tokens: &[Token]) {
        for (i, &token) in tokens.iter().enumerate() {
            if i > 0 {
                self.compute_forced();
            }
            self.committed.push(token);
            if let Err(error) = self.consume(token) {
                tracing::warn!(%error, "a committed token violates the grammar");
                self.forced.clear();
            }
        }
    }

    fn consume(&mut self, token: Token) -> anyhow::Result<()> {
        if self.forced.pop_front() != Some(token) {
            self.forced.clear();
        }
        self.matcher.consume_token(token)
    }

    /// Computes the token ids that the grammar forces next, unless they are already known.
    pub(super) fn compute_forced(&mut self) {
        if self.forced.is_empty() && !self.matcher.is_stopped() {
            self.forced = self.matcher.compute_ff_tokens().into();
        }
    }

    /// Returns the state for `restore`, to be saved before draft tokens are followed.
    pub(super) fn checkpoint(&self) -> SessionSnapshot {
        SessionSnapshot { forced: self.forced.clone(), followed: 0 }
    }

    /// Advances by a draft token that the mask allows. Returns whether the mask for the position after this
    /// token can be computed; there is no such mask after an end-of-text token.
    pub(super) fn follow_draft(&mut self, token: Token, checkpoint: &mut SessionSnapshot) -> bool {
        if !self.follows_drafts || self.end_ids.contains(&token) {
            return false;
        }
        checkpoint.followed += 1;
        self.consume(token).is_ok()
    }

    /// Returns to the state before the draft tokens. The matcher may not support rollback, because of its
    /// grammar (Lark's `max_tokens` and `stop`) or because a draft token caused an error. It is then
    /// replaced by a new matcher, which is advanced by the committed tokens and follows no more draft
    /// tokens; in this case, returns the handle that cancels the computations of the new matcher.
    pub(super) fn restore(&mut self, checkpoint: SessionSnapshot) -> Option<CancellationHandle> {
        let SessionSnapshot { forced, followed } = checkpoint;
        self.forced = forced;
        if followed == 0 {
            return None;
        }
        if self.matcher.rollback(followed).is_ok() {
            // The matcher caches its latest mask and does not detect that a rollback makes it invalid.
            self.matcher.invalidate_bias_cache();
            return None;
        }
        self.follows_drafts = false;
        let prototype = &self.copy.as_ref()?.get()?.matcher;
        self.matcher = prototype.clone().into_cancellable();
        if let Err(error) = self.matcher.consume_tokens(&self.committed) {
            tracing::warn!(%error, "the committed tokens violate the grammar");
        }
        Some(self.cancellation_handle())
    }

    /// Computes the bitmask of the next token: the bit of token id `i` is bit `i % 32` of word `i / 32`.
    /// End-of-text tokens are allowed where the text may end.
    ///
    /// `None` if the grammar cannot continue: it exceeds a limit, or no token is allowed.
    pub fn mask(&mut self) -> Option<Vec<u32>> {
        match self.try_mask() {
            Ok(bitmask) => bitmask.iter().any(|&word| word != 0).then_some(bitmask),
            Err(error) => {
                tracing::warn!(%error, "grammar mask failed");
                None
            }
        }
    }

    /// Computes the bitmask of the next token.
    ///
    /// Errors: the reason why there is no mask.
    pub(super) fn try_mask(&mut self) -> anyhow::Result<Vec<u32>> {
        self.compute_forced();
        let env = self.matcher.tok_env()?;
        if let Some(&token) = self.forced.front() {
            return Ok(env.tok_trie().singleton_token_set(token).as_slice().to_vec());
        }
        let mut bitmask = self.matcher.compute_mask_or_eos()?.as_slice().to_vec();
        if self.ignores_end {
            let mut without_end = bitmask.clone();
            for &id in &*self.end_ids {
                if let Some(word) = without_end.get_mut(id as usize / 32) {
                    *word &= !(1 << (id % 32));
                }
            }
            if without_end.iter().any(|&word| word != 0) {
                bitmask = without_end;
            }
        }
        Ok(bitmask)
    }

    /// Returns one of the allowed token ids that do not end the text; `choice` selects which one.
    pub(super) fn choose_token(&self, mask: &[u32], choice: u32) -> Option<Token> {
        let bitmask = (0..).step_by(32).zip(mask);
        let bits = bitmask.flat_map(|(first, word): (Token, &u32)| {
            (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| first + bit)
        });
        let allowed: Vec<Token> = bits.filter(|id| !self.end_ids.contains(id)).collect();
        allowed.get(choice as usize % allowed.len().max(1)).copied()
    }

    /// Whether the text is complete, so that only an end-of-text token may follow.
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
        f.debug_struct("GrammarSession")
            .field("ignores_end", &self.ignores_end)
            .finish_non_exhaustive()
    }
}
