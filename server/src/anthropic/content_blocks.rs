//! Extracts the text of Anthropic content blocks, and creates the errors for blocks without text, such as
//! images.

use crate::api_error::ApiError;
use crate::ignored_parts::IgnoredRequestParts;
use crate::openai::chat::messages::{PARTS_MAX, reject_media, text_of};
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;

/// Start of the attribution line that Claude Code puts before the system prompt. The line differs between
/// requests and has no meaning for the model; in the prompt, it would prevent prefix cache hits.
const ATTRIBUTION_PREFIX: &str = "x-anthropic-billing-header:";

/// Parses a string or a list of blocks, and returns the text of each block. Values without effect are added to
/// `hints`.
///
/// Errors: HTTP status 400 with the path of a block that has no text.
pub(super) fn block_texts(
    hints: &IgnoredRequestParts,
    path: &str,
    value: JsonValue,
) -> Result<Vec<String>, ApiError> {
    match value {
        JsonValue::Str(text) => Ok(vec![text]),
        JsonValue::List(blocks) if blocks.len() <= PARTS_MAX => {
            let text = |(index, block)| text_of_entry(hints, format!("{path}[{index}]"), block);
            blocks.into_iter().enumerate().map(text).collect()
        }
        JsonValue::List(blocks) => Err(too_many_blocks(path, blocks.len())),
        other => Err(wrong_type(path.to_owned(), "a string or a list of blocks", &other)),
    }
}

/// Returns the text of an entry in a list of content blocks; the entry is a string or a content block.
fn text_of_entry(
    hints: &IgnoredRequestParts,
    path: String,
    entry: JsonValue,
) -> Result<String, ApiError> {
    if let JsonValue::Str(text) = entry {
        return Ok(text);
    }
    let mut block = RequestFields::nested_in(hints, path, entry)?;
    let kind = block.required_string("type")?;
    block_text(&kind, &mut block)
}

/// Creates the 400 error for a list with too many blocks.
pub(super) fn too_many_blocks(path: &str, count: usize) -> ApiError {
    ApiError::invalid(path, format!("at most {PARTS_MAX} blocks, got {count}"))
}

/// Returns the text of a block of type `kind`.
///
/// Errors: HTTP status 400 with the path of the block if it has no text.
pub(super) fn block_text(kind: &str, block: &mut RequestFields) -> Result<String, ApiError> {
    match kind {
        "text" => block.required_string("text"),
        "compaction" => Ok(block.string("content", usize::MAX)?.unwrap_or_default()),
        // The definitions of all tools are already in the prompt, so the tool's name is a sufficient
        // reference.
        "tool_reference" => block.required_string("tool_name"),
        "search_result" => {
            let (title, source) =
                (block.required_string("title")?, block.required_string("source")?);
            let content = block.required("content")?;
            let content = text_of(block.hints(), &block.path("content"), content, &["text"])?;
            Ok([title, source, content].join("\n"))
        }
        "document" => document_text(block),
        _ => {
            reject_media(kind, block.own_path())?;
            Err(unsupported_block(block, "content blocks of this type are not supported"))
        }
    }
}

/// Creates the 400 error for a content block that cannot be converted to text; `message` contains the
/// reason.
pub(super) fn unsupported_block(block: &RequestFields, message: &str) -> ApiError {
    ApiError::bad_request("unsupported_content", block.own_path(), message)
}

/// Returns the title, the context and the text of a document whose source is text.
fn document_text(block: &mut RequestFields) -> Result<String, ApiError> {
    let mut texts = Vec::new();
    for name in ["title", "context"] {
        texts.extend(block.string(name, usize::MAX)?);
    }
    let source = block.required("source")?;
    let mut source = block.nested(block.path("source"), source)?;
    texts.push(match source.string("type", 64)?.as_deref() {
        Some("text") => {
            source.omit(&["media_type"]);
            source.required_string("data")?
        }
        Some("content") => {
            let content = source.required("content")?;
            text_of(source.hints(), &source.path("content"), content, &["text"])?
        }
        _ => {
            let message = "documents other than plain text are not supported by this model, which \
                           reads text only";
            return Err(unsupported_block(block, message));
        }
    });
    Ok(texts.join("\n"))
}

/// Parses a system prompt or a system message, and removes Claude Code's attribution line; `None` if the
/// remaining text is empty.
pub(super) fn system_text(
    hints: &IgnoredRequestParts,
    path: &str,
    value: JsonValue,
) -> Result<Option<String>, ApiError> {
    let texts = block_texts(hints, path, value)?;
    let count = texts.len();
    let texts: Vec<String> = texts.into_iter().filter_map(without_attribution).collect();
    Ok((count == 0 || !texts.is_empty()).then(|| texts.join("\n")))
}

/// Parses one block of a system message; `None` if the block contains only Claude Code's attribution line.
pub(super) fn system_block_text(
    hints: &IgnoredRequestParts,
    path: String,
    block: JsonValue,
) -> Result<Option<String>, ApiError> {
    text_of_entry(hints, path, block).map(without_attribution)
}

/// Removes Claude Code's attribution line from the start of `text`; `None` if the remaining text is empty.
fn without_attribution(text: String) -> Option<String> {
    if !text.starts_with(ATTRIBUTION_PREFIX) {
        return Some(text);
    }
    let rest = text.split_once('\n').map_or("", |(_, rest)| rest).trim_start_matches('\n');
    (!rest.is_empty()).then(|| rest.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hints() -> IgnoredRequestParts {
        IgnoredRequestParts::default()
    }

    fn json(text: &str) -> JsonValue {
        JsonValue::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn attribution_line_is_removed_from_system_prompts() {
        let line = "x-anthropic-billing-header: cc_version=2.1.332; cch=fa690;";
        let cases = [
            (format!("\"{line}\""), None),
            (format!("\"{line}\\n\\nBe brief.\""), Some("Be brief.")),
            (format!("[{{\"type\":\"text\",\"text\":\"{line}\"}}]"), None),
            (format!("[{{\"type\":\"text\",\"text\":\"{line}\"}},\"a\",\"b\"]"), Some("a\nb")),
            (
                "\"The x-anthropic-billing-header: a=b\"".to_owned(),
                Some("The x-anthropic-billing-header: a=b"),
            ),
            ("\"\"".to_owned(), Some("")),
            ("[]".to_owned(), Some("")),
        ];
        for (value, expected) in cases {
            let text = system_text(&hints(), "system", json(&value)).unwrap();
            assert_eq!(text.as_deref(), expected, "{value}");
        }
    }

    #[test]
    fn texts_of_documents_and_search_results_are_read() {
        let document = r#"[{"type":"document","title":"T","source":{"type":"text","media_type":"text/plain","data":"D"}}]"#;
        assert_eq!(block_texts(&hints(), "x", json(document)).unwrap(), ["T\nD"]);
        let parts = r#"[{"type":"document","source":{"type":"content","content":[{"type":"text","text":"P"}]}}]"#;
        assert_eq!(block_texts(&hints(), "x", json(parts)).unwrap(), ["P"]);
        let result = r#"[{"type":"search_result","title":"T","source":"S","content":[{"type":"text","text":"C"}]},
            {"type":"tool_reference","tool_name":"weather"}]"#;
        assert_eq!(block_texts(&hints(), "x", json(result)).unwrap(), ["T\nS\nC", "weather"]);
    }

    #[test]
    fn blocks_without_text_are_rejected_with_their_path() {
        for (block, reason) in [
            (r#"{"type":"image","source":{}}"#, "images are not supported by this model"),
            (r#"{"type":"audio"}"#, "audio is not supported by this model"),
            (
                r#"{"type":"document","source":{"type":"base64"}}"#,
                "documents other than plain text",
            ),
            (r#"{"type":"server_tool_use"}"#, "content blocks of this type"),
        ] {
            let blocks = json(&format!("[{block}]"));
            let error = block_texts(&hints(), "messages[2].content", blocks);
            let error = error.unwrap_err();
            assert_eq!(error.param.as_deref(), Some("messages[2].content[0]"), "{block}");
            assert!(error.message.starts_with(reason), "{block}: {}", error.message);
        }
    }
}
