//! Context edit `compact_…` of Anthropic's API, which replaces a long conversation by a summary. This server writes no
//! summaries: the edit is accepted as long as the prompt does not exceed its threshold.
//!
//! Fields and default values: <https://platform.claude.com/docs/en/build-with-claude/compaction>.

use super::tool_use_clearing::TypedQuantity;
use crate::api_error::ApiError;
use crate::compaction_threshold::CompactionThreshold;
use crate::request_fields::RequestFields;

const TRIGGER_TOKENS_DEFAULT: usize = 150_000;
/// Maximum length of `instructions` in bytes.
const INSTRUCTIONS_BYTES_MAX: usize = 1 << 20;

/// Parses the options of the edit, and returns the number of prompt tokens above which it would have an effect.
///
/// Errors: HTTP status 400 with the name of the invalid option.
pub(super) fn take(edit: &mut RequestFields) -> Result<CompactionThreshold, ApiError> {
    let path = edit.path("type");
    let trigger_path = edit.path("trigger");
    let trigger = edit.take("trigger");
    let trigger =
        trigger.map(|value| TypedQuantity::take(edit, trigger_path, value, &["input_tokens"]));
    edit.string("instructions", INSTRUCTIONS_BYTES_MAX)?;
    edit.bool("pause_after_compaction")?;
    let tokens = trigger.transpose()?.map_or(TRIGGER_TOKENS_DEFAULT, |trigger| trigger.value);
    Ok(CompactionThreshold { path, tokens })
}
