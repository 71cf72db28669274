//! Tokenises the texts of pooling requests.

use crate::api_error::ApiError;
use crate::app::ServingContext;
use crate::openai::params::{CompletionParams, PromptTruncation};
use crate::openai::submit::{check_prompt_len, reject_if_too_long, text_error};
use protocol::Token;

/// Tokenises a text, and truncates it if the request sets a truncation. Truncation keeps the special tokens
/// added by the tokenizer, because last-token pooling reads the end-of-sequence token.
///
/// Errors: HTTP status 400 naming `field` if the prompt is empty or too long.
pub(super) fn encode(
    serving: &ServingContext,
    text: &str,
    add_special_tokens: bool,
    params: &CompletionParams,
    field: &str,
) -> Result<Vec<Token>, ApiError> {
    reject_if_too_long(serving, text, params, field)?;
    let ids = |special| {
        serving.tokenizer.encode(text, special).map_err(|error| text_error(&error, field))
    };
    let all = ids(add_special_tokens)?;
    let ids = match params.truncate {
        Some(truncation) if all.len() > token_count_max(truncation) => {
            let plain = if add_special_tokens { ids(false)? } else { Vec::new() };
            truncate_around(all, &plain, truncation)
        }
        _ => all,
    };
    check_prompt_len(serving, params, ids.len(), field)?;
    Ok(ids)
}

/// Returns the maximum number of tokens that a truncation keeps.
fn token_count_max(truncation: PromptTruncation) -> usize {
    let (PromptTruncation::KeepLast(count) | PromptTruncation::KeepFirst(count)) = truncation;
    count as usize
}

/// Truncates `all`, which contains the text tokens `plain` and the special tokens before and after them.
/// Text tokens are removed first; special tokens are removed only if removing all text tokens is not
/// enough.
fn truncate_around(
    mut all: Vec<Token>,
    plain: &[Token],
    truncation: PromptTruncation,
) -> Vec<Token> {
    let excess = all.len().saturating_sub(token_count_max(truncation));
    let start = (0..=all.len() - plain.len()).find(|&at| all[at..].starts_with(plain));
    let Some(start) = start.filter(|_| excess <= plain.len()) else {
        crate::openai::submit::truncate(&mut all, Some(truncation));
        return all;
    };
    let end = start + plain.len();
    match truncation {
        PromptTruncation::KeepFirst(_) => all.drain(end - excess..end),
        PromptTruncation::KeepLast(_) => all.drain(start..start + excess),
    };
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncation_keeps_special_tokens() {
        let truncated = |truncation| truncate_around(vec![1, 5, 6, 7, 2], &[5, 6, 7], truncation);
        assert_eq!(truncated(PromptTruncation::KeepFirst(4)), [1, 5, 6, 2]);
        assert_eq!(truncated(PromptTruncation::KeepLast(3)), [1, 7, 2]);
        assert_eq!(truncated(PromptTruncation::KeepFirst(9)), [1, 5, 6, 7, 2]);
        assert_eq!(truncated(PromptTruncation::KeepFirst(2)), [1, 2]);
        assert_eq!(truncated(PromptTruncation::KeepFirst(1)), [1]);
        let without = |truncation| truncate_around(vec![5, 6, 7], &[], truncation);
        assert_eq!(without(PromptTruncation::KeepFirst(2)), [5, 6]);
        assert_eq!(without(PromptTruncation::KeepLast(2)), [6, 7]);
    }
}
