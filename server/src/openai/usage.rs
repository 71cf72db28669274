//! Writes the `usage` object of replies.

use bytes::{BufMut, BytesMut};
use std::io::Write;

/// Token counts of one HTTP request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct UsageInfo {
    /// Number of prompt tokens; a prompt with `n` choices is counted once.
    pub prompt_tokens: u64,
    /// Number of generated tokens of all choices, including the tokens that ended the choices.
    pub completion_tokens: u64,
    /// Number of prompt tokens found in the prefix cache.
    pub cached_tokens: u64,
    /// Number of prompt tokens in full KV blocks that were not found in the prefix cache and that this
    /// request added to the cache.
    pub created_cache_tokens: u64,
    /// Whether `prompt_tokens_details` is written.
    pub details: bool,
    /// Number of reasoning tokens; `None` without a reasoning parser.
    pub reasoning_tokens: Option<u64>,
    /// Number of draft tokens verified by speculative decoding, accepted or rejected; 0 without speculative
    /// decoding.
    pub draft_tokens: u64,
    /// Number of accepted draft tokens.
    pub accepted_draft_tokens: u64,
}

impl UsageInfo {
    /// Appends the `usage` JSON object. The object is formatted without serde for speed, because every chunk
    /// contains it with `continuous_usage_stats`.
    pub(crate) fn write(&self, out: &mut BytesMut) {
        let Self { prompt_tokens, completion_tokens, cached_tokens, created_cache_tokens, .. } =
            *self;
        let total = prompt_tokens + completion_tokens;
        // Writing to memory cannot fail, so the result is ignored.
        let _ = write!(
            out.writer(),
            "{{\"prompt_tokens\":{prompt_tokens},\"completion_tokens\":{completion_tokens},\
             \"total_tokens\":{total}"
        );
        if self.details {
            let _ = write!(
                out.writer(),
                ",\"prompt_tokens_details\":{{\"cached_tokens\":{cached_tokens},\
                 \"created_cache_tokens\":{created_cache_tokens}}}"
            );
        }
        self.write_completion_details(out);
        out.put_u8(b'}');
    }

    /// Appends `completion_tokens_details` if there is a count of reasoning tokens or draft tokens.
    fn write_completion_details(&self, out: &mut BytesMut) {
        let has_drafts = self.draft_tokens > 0;
        if self.reasoning_tokens.is_none() && !has_drafts {
            return;
        }
        out.put_slice(b",\"completion_tokens_details\":{");
        if let Some(tokens) = self.reasoning_tokens {
            let _ = write!(out.writer(), "\"reasoning_tokens\":{tokens}");
        }
        if has_drafts {
            let separator = if self.reasoning_tokens.is_some() { "," } else { "" };
            let (drafted, accepted) = (self.draft_tokens, self.accepted_draft_tokens);
            let _ = write!(
                out.writer(),
                "{separator}\"draft_tokens\":{drafted},\"accepted_draft_tokens\":{accepted}"
            );
        }
        out.put_u8(b'}');
    }
}
