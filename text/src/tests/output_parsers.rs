//! Output parsers of each model family: results are independent of chunking, and time is linear in the length
//! of the output.

mod parsing_bounds;

use crate::{
    CallEnforcement, OutputParser, OutputPiece, OutputPieces, ReasoningFamily,
    ReasoningParserOptions, ReasoningStart, ToolCallParserOptions, ToolCallSyntax, ToolDefinition,
};
use expect_test::{Expect, expect};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;

pub(super) fn tools() -> Arc<[ToolDefinition]> {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}});
    ["weather", "time"]
        .map(|name| ToolDefinition {
            name: name.to_owned(),
            parameters: parameters.clone(),
            is_strict: false,
        })
        .into()
}

pub(super) fn parser(
    syntax: ToolCallSyntax,
    reasoning: Option<ReasoningStart>,
    max_calls: u32,
) -> OutputParser {
    let family = ReasoningFamily::QWEN3;
    let reasoning = reasoning.map(|start| ReasoningParserOptions { family, start });
    parser_with(syntax, reasoning, max_calls)
}

pub(super) fn parser_with(
    syntax: ToolCallSyntax,
    reasoning: Option<ReasoningParserOptions>,
    max_calls: u32,
) -> OutputParser {
    let (tools, enforcement) = (&tools(), CallEnforcement::None);
    let options = ToolCallParserOptions { syntax, tools, max_calls, enforcement };
    OutputParser::new(reasoning, Some(options))
}

/// Parses an output that is split into `parts`.
pub(super) fn run<'a>(
    mut parser: OutputParser,
    parts: impl IntoIterator<Item = &'a str>,
) -> OutputPieces {
    let (mut pieces, mut new) = (OutputPieces::default(), OutputPieces::default());
    for part in parts {
        parser.push(part, &mut new);
        pieces.append(&new);
        new.clear();
    }
    parser.finish(&mut new);
    pieces.append(&new);
    pieces
}

/// Formats the pieces, one per line.
pub(super) fn show(pieces: &OutputPieces, text: &str) -> String {
    let mut call_starts = Vec::new();
    let line = |piece: OutputPiece<'_>| match piece {
        OutputPiece::Reasoning(text) => format!("reasoning {text:?}\n"),
        OutputPiece::Content(text) => format!("content {text:?}\n"),
        OutputPiece::Call { index, name, from } => {
            call_starts.push(from);
            format!("call {index} {name}\n")
        }
        OutputPiece::Arguments { index, text } => format!("  {index} {text}\n"),
        OutputPiece::End { index } => format!("end {index}\n"),
        OutputPiece::Broken { index, to } => {
            format!("broken {index} {:?}\n", &text[call_starts[index as usize]..to])
        }
    };
    pieces.iter().map(line).collect()
}

pub(super) fn check(syntax: ToolCallSyntax, text: &str, expected: &Expect) {
    expected.assert_eq(&show(&run(parser(syntax, None, u32::MAX), [text]), text));
}

#[test]
fn hermes_tool_calls() {
    let text = "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn \\u00e9\"}}\n</tool_call>\n<tool_call>\n{\"arguments\": {\"days\": [1]}, \"name\": \"time\"}\n</tool_call>\n";
    check(
        ToolCallSyntax::HERMES,
        text,
        &expect![[r#"
        content "I look."
        call 0 weather
          0 {"city": "Bonn \u00e9"}
        end 0
        call 1 time
          1 {"days": [1]}
        end 1
    "#]],
    );
    let text = "a <tool_call>none</tool_call> <tool_call>{\"name\": \"time\"}</tool_call>b";
    check(
        ToolCallSyntax::HERMES,
        text,
        &expect![[r#"
        content "a <tool_call>none</tool_call>"
        call 0 time
          0 {}
        end 0
        content "b"
    "#]],
    );
    let text = "x \n<tool_call>\n{\"name\": \"time\", \"arguments\": {\"a\": tru}}\n</tool_call>";
    check(
        ToolCallSyntax::HERMES,
        text,
        &expect![[r#"
        content "x"
        call 0 time
          0 {"a": tru
        broken 0 " \n<tool_call>\n{\"name\": \"time\", \"arguments\": {\"a\": tru"
        content "}}\n</tool_call>"
    "#]],
    );
}

#[test]
fn qwen3_coder_tool_calls() {
    let text = "Sure.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n\"am\" Rhein\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=tags>\n[\"a\"]\n</parameter>\n</function>\n</tool_call>";
    check(
        ToolCallSyntax::QWEN3_CODER,
        text,
        &expect![[r#"
        content "Sure."
        call 0 weather
          0 {"city": "Bonn\n\"am\" Rhein", "days": 3, "tags": ["a"]}
        end 0
    "#]],
    );
    let text = "<function=time></function><tool_call> <function=time> <parameter=city>x<parameter=days>many</function></tool_call>";
    check(
        ToolCallSyntax::QWEN3_CODER,
        text,
        &expect![[r#"
        call 0 time
          0 {}
        end 0
        call 1 time
          1 {"city": "x", "days": "many"}
        end 1
    "#]],
    );
}

#[test]
fn json_in_qwen3_coder_tags_is_content() {
    check(
        ToolCallSyntax::QWEN3_CODER,
        "<tool_call>\n{\"name\": 1}</tool_call>",
        &expect![[r#"
        content "<tool_call>\n{\"name\": 1}</tool_call>"
    "#]],
    );
}

#[test]
fn llama3_json_tool_calls() {
    let text = " <|python_tag|>{\"name\": \"weather\", \"parameters\": {\"city\": \"Bonn\"}}; {\"type\": \"function\", \"name\": \"time\", \"parameters\": {}}";
    check(
        ToolCallSyntax::LLAMA3_JSON,
        text,
        &expect![[r#"
        call 0 weather
          0 {"city": "Bonn"}
        end 0
        call 1 time
          1 {}
        end 1
    "#]],
    );
    check(
        ToolCallSyntax::LLAMA3_JSON,
        "{\"name\": \"Bob\", \"age\": 4}",
        &expect![[r#"
        content "{\"name\": \"Bob\", \"age\": 4}"
    "#]],
    );
    check(
        ToolCallSyntax::LLAMA3_JSON,
        " <|py{\"name\"",
        &expect![[r#"
        content " <|py{\"name\""
    "#]],
    );
}

#[test]
fn mistral_tool_calls() {
    let text = "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\"}, \"id\": \"abcdefghi\"}, {\"name\": \"time\", \"arguments\": {}}]";
    let both = expect![[r#"
        call 0 weather
          0 {"city": "Bonn"}
        end 0
        call 1 time
          1 {}
        end 1
    "#]];
    check(ToolCallSyntax::MISTRAL, text, &both);
    let text = "[TOOL_CALLS]weather{\"city\": \"Bonn\"}[TOOL_CALLS]time[CALL_ID]abc123[ARGS]{}";
    check(ToolCallSyntax::MISTRAL, text, &both);
    check(
        ToolCallSyntax::MISTRAL,
        "no [TOOL_CALLS](x) [TOOL_CALLS] [1",
        &expect![[r#"
        content "no [TOOL_CALLS](x) [TOOL_CALLS] [1"
    "#]],
    );
}

#[test]
fn deepseek_tool_calls() {
    let v3 = "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Bonn\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let both = expect![[r#"
        content "Ok."
        call 0 weather
          0 {"city": "Bonn"}
        end 0
        call 1 time
          1 {}
        end 1
    "#]];
    check(ToolCallSyntax::DEEPSEEK_V3, v3, &both);
    let v31 = "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Bonn\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(ToolCallSyntax::DEEPSEEK_V31, v31, &both);
    check(
        ToolCallSyntax::DEEPSEEK_V31,
        "<｜tool▁calls▁begin｜> no",
        &expect![[r#"
        content "<｜tool▁calls▁begin｜> no"
    "#]],
    );
}

#[test]
fn reasoning_is_split_from_content() {
    let of = |start, text: &str| {
        show(&run(parser(ToolCallSyntax::HERMES, Some(start), u32::MAX), [text]), text)
    };
    let expected = "reasoning \"\\nhm </b>\\n\"\ncontent \"\\n\\nhi\"\n";
    assert_eq!(of(ReasoningStart::AtMarker, "\n<think>\nhm </b>\n</think>\n\nhi"), expected);
    assert_eq!(of(ReasoningStart::Inside, "\nhm </b>\n</think>\n\nhi"), expected);
    assert_eq!(of(ReasoningStart::Inside, "<think>\nhm </b>\n</think>\n\nhi"), expected);
    assert_eq!(of(ReasoningStart::AtMarker, "hi <think>"), "content \"hi <think>\"\n");
    assert_eq!(of(ReasoningStart::AtMarker, " <thi"), "content \" <thi\"\n");
    assert_eq!(of(ReasoningStart::After, "<think>"), "content \"<think>\"\n");
    assert_eq!(of(ReasoningStart::Inside, "</think>hi"), "content \"hi\"\n");
    assert_eq!(of(ReasoningStart::Inside, "hm </thi"), "reasoning \"hm </thi\"\n");
    let call = "reasoning \"go \"\ncall 0 time\n  0 {}\nend 0\n";
    assert_eq!(of(ReasoningStart::Inside, "go <tool_call>{\"name\": \"time\"}</tool_call>"), call);
}

#[test]
fn reasoning_start_depends_on_the_preceding_text() {
    assert_eq!(
        ReasoningFamily::QWEN3.start_after_prompt("assistant\n<think>\n"),
        ReasoningStart::Inside
    );
    assert_eq!(
        ReasoningFamily::DEEPSEEK_R1.start_after_prompt("x<think>\n\n</think>\n\n"),
        ReasoningStart::After
    );
    assert_eq!(
        ReasoningFamily::DEEPSEEK_R1.start_after_prompt("assistant"),
        ReasoningStart::Inside
    );
    assert_eq!(ReasoningFamily::QWEN3.start_after_message("<think>a"), ReasoningStart::Inside);
    assert_eq!(
        ReasoningFamily::DEEPSEEK_R1.start_after_message("<think>a</think>b"),
        ReasoningStart::After
    );
}
