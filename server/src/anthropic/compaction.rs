//! Context edit `compact_…` of Anthropic's API, which replaces a long conversation by a summary. This server writes no
//! summaries: the edit is accepted as long as the prompt does not exceed its threshold.
//!
//! Fields and default values: <https://platform.claude.com/docs/en/build-with-claude/compaction>.

use super::tool_use_clearing::{PromptTokenCounter, TypedQuantity};
use crate::api_error::ApiError;
use crate::request_fields::RequestFields;
use serde_json::Value;

const TRIGGER_TOKENS_DEFAULT: usize = 150_000;
/// Maximum length of `instructions` in bytes.
const INSTRUCTIONS_BYTES_MAX: usize = 1 << 20;

/// Edit that summarises conversations above a threshold.
#[derive(Debug, PartialEq)]
pub(super) struct CompactionEdit {
    /// Path of the edit in the request.
    path: String,
    /// Number of prompt tokens above which the edit would have an effect.
    trigger_tokens: usize,
}

impl CompactionEdit {
    /// Parses the options of the edit.
    ///
    /// Errors: HTTP status 400 with the name of the invalid option.
    pub(super) fn take(edit: &mut RequestFields) -> Result<Self, ApiError> {
        let path = edit.path("type");
        let trigger_path = edit.path("trigger");
        let trigger = edit.take("trigger");
        let trigger =
            trigger.map(|value| TypedQuantity::take(trigger_path, value, &["input_tokens"]));
        edit.string("instructions", INSTRUCTIONS_BYTES_MAX)?;
        edit.bool("pause_after_compaction")?;
        let trigger_tokens =
            trigger.transpose()?.map_or(TRIGGER_TOKENS_DEFAULT, |trigger| trigger.value);
        Ok(Self { path, trigger_tokens })
    }

    /// Checks that the edit would leave the prompt of `messages` as it is. Prompts of more than `context` tokens are left
    /// to the check of the length, whose error clients recognise.
    ///
    /// Errors: HTTP status 400 with the name of the edit if the prompt exceeds the threshold; an error of the chat
    /// template.
    pub(super) fn check(
        &self,
        messages: &Value,
        prompt: &impl PromptTokenCounter,
        context: usize,
    ) -> Result<(), ApiError> {
        let trigger = self.trigger_tokens;
        if trigger >= context
            || prompt.fits(messages, trigger)?
            || !prompt.fits(messages, context)?
        {
            return Ok(());
        }
        let message = format!(
            "the prompt exceeds the {} tokens above which it would be compacted, and this server writes no summaries: \
             shorten the conversation, raise `trigger`, or leave out this edit",
            self.trigger_tokens
        );
        Err(ApiError::unsupported(self.path.clone(), message))
    }
}
