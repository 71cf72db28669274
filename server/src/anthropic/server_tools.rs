//! Content blocks of tools that ran on Anthropic's servers (web search, web fetch, code execution, tool
//! search, MCP) earlier in a conversation. A call becomes a tool call in the prompt; a result becomes a tool
//! result with its text.

use super::content_blocks::{block_text, block_texts, too_many_blocks, unsupported_block};
use crate::api_error::ApiError;
use crate::openai::chat::messages::{self, PARTS_MAX};
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde_json::{Value, json};

/// Block types that contain the result of a server tool.
const RESULTS: &[&str] = &[
    "advisor_tool_result",
    "bash_code_execution_tool_result",
    "code_execution_tool_result",
    "mcp_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "web_fetch_tool_result",
    "web_search_tool_result",
];

/// Whether blocks of type `kind` contain the result of a server tool.
pub(super) fn is_result(kind: &str) -> bool {
    RESULTS.contains(&kind)
}

/// Converts a server tool call to a tool call for the chat template. The name of an MCP tool becomes
/// `<server>__<tool>`, as in `/v1/responses`.
pub(super) fn call(block: &mut RequestFields) -> Result<Value, ApiError> {
    let (id, name) = (block.required_string("id")?, block.required_string("name")?);
    let name = match block.string("server_name", usize::MAX)? {
        Some(server) => format!("{server}__{name}"),
        None => name,
    };
    let input = messages::arguments(&block.path("input"), block.take("input"))?;
    Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": input}}))
}

/// Converts the result of a server tool to a template message.
///
/// Errors: HTTP status 400 with the path of a result that has no text.
pub(super) fn result(block: &mut RequestFields) -> Result<Value, ApiError> {
    let id = block.required_string("tool_use_id")?;
    let path = block.path("content");
    let content = match block.take("content") {
        None => String::new(),
        Some(value @ JsonValue::Object(_)) => result_text(block.nested(path, value)?)?,
        Some(JsonValue::List(entries)) if entries.len() > PARTS_MAX => {
            return Err(too_many_blocks(&path, entries.len()));
        }
        Some(JsonValue::List(entries)) => {
            let text = |(index, entry)| entry_text(block, format!("{path}[{index}]"), entry);
            let texts = entries.into_iter().enumerate().map(text);
            texts.collect::<Result<Vec<_>, _>>()?.join("\n")
        }
        Some(value) => block_texts(block.hints(), &path, value)?.join("\n"),
    };
    Ok(json!({"role": "tool", "tool_call_id": id, "content": content}))
}

/// Returns the text of an entry in the result list of `block`: a string, a web search result, or a content
/// block.
fn entry_text(block: &RequestFields, path: String, entry: JsonValue) -> Result<String, ApiError> {
    if let JsonValue::Str(text) = entry {
        return Ok(text);
    }
    let mut entry = block.nested(path, entry)?;
    match entry.required_string("type")?.as_str() {
        // The page content is encrypted, so only the title, URL and age are used.
        "web_search_result" => lines(&mut entry, &["title", "url", "page_age"]),
        kind => block_text(kind, &mut entry),
    }
}

/// Returns the URL and the text of a fetched document.
fn fetched_text(result: &mut RequestFields) -> Result<String, ApiError> {
    let url = lines(result, &["url"])?;
    let document = result.required("content")?;
    let document =
        block_texts(result.hints(), &result.path("content"), JsonValue::List(vec![document]))?;
    Ok(format!("{url}\n{}", document.join("\n")))
}

/// Returns the text of a tool result that is an object.
fn result_text(mut result: RequestFields) -> Result<String, ApiError> {
    let kind = result.required_string("type")?;
    match kind.as_str() {
        kind if kind.ends_with("_error") => {
            let error = lines(&mut result, &["error_code", "error_message"])?;
            Ok(format!("error: {error}"))
        }
        "web_fetch_result" => fetched_text(&mut result),
        "code_execution_result" | "bash_code_execution_result" => execution_text(&mut result),
        "text_editor_code_execution_view_result" => lines(&mut result, &["content"]),
        "text_editor_code_execution_create_result" => {
            let is_update = result.bool("is_file_update")?.unwrap_or(false);
            Ok(if is_update { "file updated" } else { "file created" }.to_owned())
        }
        "text_editor_code_execution_str_replace_result" => {
            let lines = result.strings("lines", usize::MAX, PARTS_MAX)?;
            Ok(lines.unwrap_or_default().join("\n"))
        }
        "tool_search_tool_search_result" => {
            let references = result.required("tool_references")?;
            let path = result.path("tool_references");
            Ok(block_texts(result.hints(), &path, references)?.join("\n"))
        }
        "advisor_result" => lines(&mut result, &["text"]),
        _ => {
            let message = format!("results of type {kind:?} are not supported here");
            Err(unsupported_block(&result, &message))
        }
    }
}

/// Returns the text of a code execution result: stdout, stderr, the exit status if it is not 0, and the ids
/// of the created files.
fn execution_text(result: &mut RequestFields) -> Result<String, ApiError> {
    let mut texts = vec![lines(result, &["stdout", "stderr"])?];
    let status = result.int("return_code", i64::MIN..=i64::MAX)?.unwrap_or(0);
    if status != 0 {
        texts.push(format!("return code {status}"));
    }
    let path = result.path("content");
    match result.take("content") {
        None => {}
        Some(JsonValue::List(files)) if files.len() <= PARTS_MAX => {
            for (index, file) in files.into_iter().enumerate() {
                let mut file = result.nested(format!("{path}[{index}]"), file)?;
                texts.push(format!("file {}", file.required_string("file_id")?));
                file.omit(&["type"]);
            }
        }
        Some(JsonValue::List(files)) => return Err(too_many_blocks(&path, files.len())),
        Some(other) => return Err(wrong_type(path, "a list of files", &other)),
    }
    texts.retain(|text| !text.is_empty());
    Ok(texts.join("\n"))
}

/// Returns the values of the fields `names` that are non-empty strings, joined by line breaks.
fn lines(fields: &mut RequestFields, names: &[&str]) -> Result<String, ApiError> {
    let mut lines = Vec::new();
    for name in names {
        lines.extend(fields.string(name, usize::MAX)?.filter(|line| !line.is_empty()));
    }
    Ok(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(value: &Value) -> RequestFields {
        let value = JsonValue::parse(value.to_string().as_bytes()).unwrap();
        RequestFields::of("messages[1].content[2]".to_owned(), value).unwrap()
    }

    fn text(content: &Value) -> Result<String, ApiError> {
        let block = json!({"tool_use_id": "t", "content": content});
        let message = result(&mut fields(&block))?;
        assert_eq!((&message["role"], &message["tool_call_id"]), (&json!("tool"), &json!("t")));
        Ok(message["content"].as_str().unwrap().to_owned())
    }

    #[test]
    fn results_of_every_server_tool_have_a_text() {
        let document = json!({"type": "document", "title": "T",
            "source": {"type": "text", "media_type": "text/plain", "data": "D"}});
        let page = json!({"type": "web_search_result", "title": "T", "url": "u",
            "encrypted_content": "x", "page_age": null});
        let run = json!({"type": "bash_code_execution_result", "stdout": "o", "stderr": "e",
            "return_code": 2, "content": [{"type": "bash_code_execution_output", "file_id": "f"}]});
        for (content, expected) in [
            (json!([page, page]), "T\nu\nT\nu"),
            (
                json!({"type": "web_search_tool_result_error", "error_code": "max_uses"}),
                "error: max_uses",
            ),
            (json!({"type": "web_fetch_result", "url": "u", "content": document}), "u\nT\nD"),
            (run, "o\ne\nreturn code 2\nfile f"),
            (
                json!({"type": "code_execution_result", "stdout": "o", "stderr": "", "return_code": 0}),
                "o",
            ),
            (json!({"type": "text_editor_code_execution_view_result", "content": "a"}), "a"),
            (
                json!({"type": "text_editor_code_execution_create_result", "is_file_update": true}),
                "file updated",
            ),
            (
                json!({"type": "text_editor_code_execution_str_replace_result", "lines": ["-a", "+b"]}),
                "-a\n+b",
            ),
            (
                json!({"type": "tool_search_tool_search_result", "tool_references": [{"type": "tool_reference", "tool_name": "f"}]}),
                "f",
            ),
            (json!("m"), "m"),
            (json!([{"type": "text", "text": "m"}, {"type": "text", "text": "n"}]), "m\nn"),
            (Value::Null, ""),
        ] {
            assert_eq!(text(&content).unwrap(), expected, "{content}");
        }
    }

    #[test]
    fn results_without_text_are_rejected_by_name() {
        let pdf = json!({"type": "document", "source": {"type": "base64", "data": "AA"}});
        for (content, param) in [
            (json!({"type": "web_fetch_result", "url": "u", "content": pdf}), ".content[0]"),
            (json!({"type": "encrypted_code_execution_result", "encrypted_stdout": "x"}), ""),
            (json!([{"type": "image", "source": {}}]), "[0]"),
        ] {
            let expected = format!("messages[1].content[2].content{param}");
            assert_eq!(text(&content).unwrap_err().param, Some(expected), "{content}");
        }
    }

    #[test]
    fn calls_name_their_mcp_server() {
        let block = json!({"id": "i", "name": "find", "server_name": "docs", "input": {"q": 1}});
        let function = json!({"name": "docs__find", "arguments": {"q": 1}});
        let expected = json!({"id": "i", "type": "function", "function": function});
        assert_eq!(call(&mut fields(&block)).unwrap(), expected);
    }
}
