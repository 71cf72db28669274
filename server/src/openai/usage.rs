//! The `usage` object.

use bytes::{BufMut, BytesMut};
use std::io::Write;

/// Token counts of one HTTP request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct UsageInfo {
    /// Tokens of the prompts, once per prompt.
    pub prompt_tokens: u64,
    /// Tokens of all choices, up to and including the one that ended each.
    pub completion_tokens: u64,
    /// Prompt tokens found in the cache.
    pub cached_tokens: u64,
    /// Prompt tokens whose blocks this request added to the cache.
    pub created_cache_tokens: u64,
    /// Whether the details of the prompt are shown.
    pub details: bool,
    /// Tokens of reasoning, if it is told apart.
    pub reasoning_tokens: Option<u64>,
}

impl UsageInfo {
    /// Appends the JSON object. Written by hand: with `continuous_usage_stats` it is in every chunk.
    pub(crate) fn write(&self, out: &mut BytesMut) {
        let Self { prompt_tokens, completion_tokens, cached_tokens, created_cache_tokens, .. } =
            *self;
        let total = prompt_tokens + completion_tokens;
        // Writing to memory cannot fail.
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
        if let Some(tokens) = self.reasoning_tokens {
            let _ = write!(
                out.writer(),
                ",\"completion_tokens_details\":{{\"reasoning_tokens\":{tokens}}}"
            );
        }
        out.put_u8(b'}');
    }
}
