//! Prompt length above which a request asks for a summary of its conversation (`compact_…` edits of the Messages API,
//! `context_management` of the Responses API). This server writes no summaries, so it rejects such prompts.

use crate::api_error::ApiError;

/// Threshold of one compaction entry in a request.
#[derive(Debug, PartialEq)]
pub(crate) struct CompactionThreshold {
    /// Path of the request field in errors.
    pub path: String,
    /// Number of prompt tokens above which the conversation would be replaced by a summary.
    pub tokens: usize,
}

impl CompactionThreshold {
    /// Checks that the prompt does not exceed the threshold. `token_count(maximum)` counts the tokens of the prompt, and
    /// returns `None` if there are more than `maximum`. Prompts of more than `context` tokens are accepted here, because
    /// clients recognise the error of the length check.
    ///
    /// Errors: HTTP status 400 with the path of the threshold; an error of `token_count`.
    pub(crate) fn check(
        &self,
        context: usize,
        token_count: impl FnOnce(usize) -> Result<Option<usize>, ApiError>,
    ) -> Result<(), ApiError> {
        if self.tokens >= context {
            return Ok(());
        }
        let Some(count) = token_count(context)?.filter(|&count| count > self.tokens) else {
            return Ok(());
        };
        let message = format!(
            "the prompt has {count} tokens, more than the {} above which it would be compacted, and this server writes no \
             summaries: shorten the conversation, raise the threshold, or leave out this entry",
            self.tokens
        );
        Err(ApiError::unsupported(self.path.clone(), message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(tokens: usize, context: usize, prompt: usize) -> Result<(), ApiError> {
        let threshold = CompactionThreshold { path: "edits[0]".to_owned(), tokens };
        threshold.check(context, |maximum| Ok(Some(prompt).filter(|&count| count <= maximum)))
    }

    #[test]
    fn only_prompts_between_threshold_and_context_are_rejected() {
        assert!(check(10, 100, 10).is_ok());
        assert!(check(10, 100, 101).is_ok());
        assert!(check(100, 100, 100).is_ok());
        for prompt in [11, 100] {
            let error = check(10, 100, prompt).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("edits[0]")));
            assert!(error.message.contains(&format!("{prompt} tokens")), "{}", error.message);
        }
    }
}
