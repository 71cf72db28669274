//! Output parsers of each model family: results are independent of chunking, and time is linear in the length
//! of the output.

use crate::{
    OutputParser, OutputPiece, OutputPieces, ReasoningFamily, ReasoningStart,
    ToolCallParserOptions, ToolCallSyntax, ToolDefinition,
};
use expect_test::{Expect, expect};
use proptest::prelude::*;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;

fn tools() -> Arc<[ToolDefinition]> {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}});
    ["weather", "time"]
        .map(|name| ToolDefinition { name: name.to_owned(), parameters: parameters.clone() })
        .into()
}

fn parser(
    syntax: ToolCallSyntax,
    reasoning: Option<ReasoningStart>,
    max_calls: u32,
) -> OutputParser {
    OutputParser::new(reasoning, Some(ToolCallParserOptions { syntax, tools: &tools(), max_calls }))
}

/// Parses an output that is split into `parts`.
fn run<'a>(mut parser: OutputParser, parts: impl IntoIterator<Item = &'a str>) -> OutputPieces {
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
fn show(pieces: &OutputPieces, text: &str) -> String {
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

fn check(syntax: ToolCallSyntax, text: &str, expected: &Expect) {
    expected.assert_eq(&show(&run(parser(syntax, None, u32::MAX), [text]), text));
}

#[test]
fn hermes_tool_calls() {
    let text = "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn \\u00e9\"}}\n</tool_call>\n<tool_call>\n{\"arguments\": {\"days\": [1]}, \"name\": \"time\"}\n</tool_call>\n";
    check(
        ToolCallSyntax::Hermes,
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
        ToolCallSyntax::Hermes,
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
        ToolCallSyntax::Hermes,
        text,
        &expect![[r#"
        content "x"
        call 0 time
          0 {"a": tru
        broken 0 " \n<tool_call>\n{\"name\": \"time\", \"arguments\": {\"a\": tru}"
        content "}}\n</tool_call>"
    "#]],
    );
}

#[test]
fn qwen3_coder_tool_calls() {
    let text = "Sure.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n\"am\" Rhein\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=tags>\n[\"a\"]\n</parameter>\n</function>\n</tool_call>";
    check(
        ToolCallSyntax::Qwen3Coder,
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
        ToolCallSyntax::Qwen3Coder,
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
    check(
        ToolCallSyntax::Qwen3Coder,
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
        ToolCallSyntax::Llama3Json,
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
        ToolCallSyntax::Llama3Json,
        "{\"name\": \"Bob\", \"age\": 4}",
        &expect![[r#"
        content "{\"name\": \"Bob\", \"age\": 4}"
    "#]],
    );
    check(
        ToolCallSyntax::Llama3Json,
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
    check(ToolCallSyntax::Mistral, text, &both);
    let text = "[TOOL_CALLS]weather{\"city\": \"Bonn\"}[TOOL_CALLS]time[CALL_ID]abc123[ARGS]{}";
    check(ToolCallSyntax::Mistral, text, &both);
    check(
        ToolCallSyntax::Mistral,
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
    check(ToolCallSyntax::DeepSeekV3, v3, &both);
    let v31 = "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Bonn\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(ToolCallSyntax::DeepSeekV31, v31, &both);
    check(
        ToolCallSyntax::DeepSeekV31,
        "<｜tool▁calls▁begin｜> no",
        &expect![[r#"
        content "<｜tool▁calls▁begin｜> no"
    "#]],
    );
}

#[test]
fn reasoning_is_split_from_content() {
    let of = |start, text: &str| {
        show(&run(parser(ToolCallSyntax::Hermes, Some(start), u32::MAX), [text]), text)
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

    assert_eq!(
        ReasoningFamily::Qwen3.start_after_prompt("assistant\n<think>\n"),
        ReasoningStart::Inside
    );
    assert_eq!(
        ReasoningFamily::DeepSeekR1.start_after_prompt("x<think>\n\n</think>\n\n"),
        ReasoningStart::After
    );
    assert_eq!(ReasoningFamily::DeepSeekR1.start_after_prompt("assistant"), ReasoningStart::Inside);
    assert_eq!(ReasoningFamily::Qwen3.start_after_message("<think>a"), ReasoningStart::Inside);
    assert_eq!(
        ReasoningFamily::DeepSeekR1.start_after_message("<think>a</think>b"),
        ReasoningStart::After
    );
}

#[test]
fn calls_beyond_the_limit_are_dropped() {
    let text = "<tool_call>{\"name\": \"time\"}</tool_call> <tool_call>{\"name\": \"weather\"}</tool_call>";
    let pieces = run(parser(ToolCallSyntax::Hermes, None, 1), [text]);
    assert_eq!(show(&pieces, text), "call 0 time\n  0 {}\nend 0\n");
}

const ALL: [ToolCallSyntax; 6] = [
    ToolCallSyntax::Hermes,
    ToolCallSyntax::Qwen3Coder,
    ToolCallSyntax::Llama3Json,
    ToolCallSyntax::Mistral,
    ToolCallSyntax::DeepSeekV3,
    ToolCallSyntax::DeepSeekV31,
];

/// Fragments of every tool call syntax, so that random sequences of them are almost valid calls.
const OUTPUT_FRAGMENTS: &[&str] = &[
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "time>",
    "</function>",
    "<parameter=",
    "days>",
    "</parameter>",
    "\n",
    " ",
    "{\"name\": \"time\"",
    ", ",
    "\"arguments\": ",
    "{\"city\": \"é",
    "\"}",
    "}",
    "{",
    "[TOOL_CALLS]",
    "[",
    "]",
    "time",
    "[ARGS]",
    "[CALL_ID]",
    ";",
    "<|python_tag|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "function<｜tool▁sep｜>",
    "time\n```json\n",
    "\n```",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "1",
    "null",
    "<",
    "x",
    MANY_SPACES,
    LONG_WORD,
];

/// Placeholders in `OUTPUT_FRAGMENTS`: they are replaced by more spaces, and a longer name, than a parser
/// holds back.
const MANY_SPACES: &str = "\u{1}";
const LONG_WORD: &str = "\u{2}";

proptest! {
    #[test]
    fn output_parsing_is_chunking_invariant(
        fragments in prop::collection::vec(0..OUTPUT_FRAGMENTS.len(), 0..40),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        syntax in 0..ALL.len(),
        start in 0..4_usize,
        max_calls in 1..3_u32,
    ) {
        let text: String = fragments.into_iter().map(|i| OUTPUT_FRAGMENTS[i]).collect();
        let text = text.replace(MANY_SPACES, &" ".repeat(300)).replace(LONG_WORD, &"n".repeat(600));
        let starts = [ReasoningStart::AtMarker, ReasoningStart::Inside, ReasoningStart::After].map(Some);
        let start = [&starts[..], &[None]].concat()[start];
        let whole = run(parser(ALL[syntax], start, max_calls), [text.as_str()]);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.index(text.len() + 1)).collect();
        cuts.extend([0, text.len()]);
        cuts.retain(|&cut| text.is_char_boundary(cut));
        cuts.sort_unstable();
        let parts = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]);
        prop_assert_eq!(&whole, &run(parser(ALL[syntax], start, max_calls), parts));
        let one_by_one = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
        prop_assert_eq!(&whole, &run(parser(ALL[syntax], start, max_calls), one_by_one));
        check_calls(&whole, &text)?;
    }
}

/// Checks that the arguments of each complete call are a JSON object, and that a broken call refers to its
/// own text in the output.
fn check_calls(pieces: &OutputPieces, text: &str) -> Result<(), TestCaseError> {
    let mut open: Option<(u32, usize, String)> = None;
    for piece in pieces.iter() {
        match piece {
            OutputPiece::Call { index, from, .. } => {
                prop_assert!(open.is_none());
                open = Some((index, from, String::new()));
            }
            OutputPiece::Arguments { index, text } => {
                let (of, _, arguments) = open.as_mut().expect("a call is open");
                prop_assert_eq!(*of, index);
                arguments.push_str(text);
            }
            OutputPiece::End { index } => {
                let (of, _, arguments) = open.take().expect("a call is open");
                prop_assert_eq!(of, index);
                let value: serde_json::Value = serde_json::from_str(&arguments).unwrap();
                prop_assert!(value.is_object(), "{}", arguments);
            }
            OutputPiece::Broken { index, to } => {
                let (of, from, _) = open.take().expect("a call is open");
                prop_assert_eq!(of, index);
                prop_assert!(text.get(from..to).is_some());
            }
            OutputPiece::Content(_) | OutputPiece::Reasoning(_) => prop_assert!(open.is_none()),
        }
    }
    prop_assert!(open.is_none());
    Ok(())
}

/// Outputs that never become a tool call: the text held back stays bounded, whatever their length.
#[test]
fn held_back_output_is_bounded() {
    const HELD_BACK_MAX: usize = 256 << 10;
    for (syntax, prefix, unit) in [
        (ToolCallSyntax::Hermes, "<tool_call>", " "),
        (ToolCallSyntax::Hermes, "<tool_call>{", "\n"),
        (ToolCallSyntax::Hermes, "<tool_call>{\"arguments\": {\"a\": \"", "x"),
        (ToolCallSyntax::Hermes, "<tool_call>{\"id\": \"x\"", " "),
        (ToolCallSyntax::Qwen3Coder, "<tool_call>", " "),
        (ToolCallSyntax::Qwen3Coder, "<function=", "x"),
        (ToolCallSyntax::Llama3Json, "", " "),
        (ToolCallSyntax::Llama3Json, "<|python_tag|>", " "),
        (ToolCallSyntax::Llama3Json, "{", " "),
        (ToolCallSyntax::Llama3Json, "{\"name\": \"time\"};", ";"),
        (ToolCallSyntax::Mistral, "[TOOL_CALLS]", " "),
        (ToolCallSyntax::Mistral, "[TOOL_CALLS] [", " "),
        (ToolCallSyntax::Mistral, "[TOOL_CALLS]", "x"),
        (ToolCallSyntax::DeepSeekV3, "", "<｜tool▁calls▁begin｜>"),
        (ToolCallSyntax::DeepSeekV3, "<｜tool▁calls▁begin｜>", " "),
        (ToolCallSyntax::DeepSeekV3, "<｜tool▁call▁begin｜>", "x"),
        (ToolCallSyntax::DeepSeekV31, "<｜tool▁call▁begin｜>", " "),
    ] {
        let (mut parser, mut pieces) = (parser(syntax, None, u32::MAX), OutputPieces::default());
        let (mut read, mut emitted, mut held_back_max) = (0, 0, 0);
        while read < 1 << 20 {
            let part = if read == 0 { prefix } else { unit };
            parser.push(part, &mut pieces);
            read += part.len().max(1);
            let content =
                |piece| if let OutputPiece::Content(text) = piece { text.len() } else { 0 };
            emitted += pieces.iter().map(content).sum::<usize>();
            pieces.clear();
            held_back_max = held_back_max.max(read - read.min(emitted));
        }
        assert!(
            held_back_max < HELD_BACK_MAX,
            "{syntax:?} {prefix:?} {unit:?} holds {held_back_max} bytes"
        );
    }
}

/// The schema of an argument is evaluated once, however often the argument occurs.
#[test]
fn long_tool_schema_is_read_once() {
    let values: Vec<String> = (0..100_000).map(|i| format!("v{i}")).collect();
    let schema = json!({"properties": {"a": {"enum": values}, "n": {"enum": [1, 2]}}});
    let tools: Arc<[ToolDefinition]> =
        [ToolDefinition { name: "x".to_owned(), parameters: schema }].into();
    let syntax = ToolCallSyntax::Qwen3Coder;
    let rules = ToolCallParserOptions { syntax, tools: &tools, max_calls: u32::MAX };
    let mut parser = OutputParser::new(None, Some(rules));
    let text = format!("<function=x>{}<parameter=n>2", "<parameter=a>v7".repeat(60_000));
    let mut pieces = OutputPieces::default();
    let start = processor_time();
    parser.push(&text, &mut pieces);
    // Evaluating the 100,000 values of the schema for each of the 60,000 arguments would take minutes.
    assert!(processor_time().saturating_sub(start) < Duration::from_secs(5));
    let Some(OutputPiece::Arguments { text, .. }) = pieces.iter().last() else {
        panic!("no arguments")
    };
    assert!(text.starts_with("{\"a\": \"v7\", \"a\": \"v7\"") && text.ends_with("\"n\": "));
}

/// Returns the CPU time used by this thread.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

#[test]
fn megabyte_output_parses_fast_in_bounded_memory() {
    let units = [
        "<tool_call>",
        "<tool_cal",
        "<tool_call>{\"name\": \"time\", \"arguments\": {",
        "[",
        "{",
        "\"",
        "<function=x>",
        "<parameter=a>",
        "<parameter=a>\n\n",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]a",
        " ",
        "\n",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "</thin",
        "<think>",
    ];
    let mut worst = Duration::ZERO;
    for unit in units {
        for syntax in ALL {
            let text = unit.repeat((1 << 20) / unit.len());
            let mut parser = parser(syntax, Some(ReasoningStart::AtMarker), u32::MAX);
            let (mut pieces, start) = (OutputPieces::default(), processor_time());
            parser.push(&text, &mut pieces);
            parser.finish(&mut pieces);
            let took = processor_time().saturating_sub(start);
            // `tests/bench/output_parsers.rs` measures a release build alone on its CPU. Here only a parser
            // that is not linear takes longer than the limit, whatever the build and the load of the machine.
            assert!(took < Duration::from_secs(5), "{syntax:?} {unit:?} took {took:?}");
            worst = worst.max(took);
        }
    }
    println!("the worst took {worst:?}");
}
