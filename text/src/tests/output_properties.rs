//! Properties of the output parsers for random outputs: the result does not depend on the chunking, and the
//! content and the texts of the calls together are the whole output.

use super::output_parsers::{parser, run};
use crate::{OutputPiece, OutputPieces, ReasoningStart, ToolCallSyntax};
use proptest::prelude::*;

/// Fragments of every tool call syntax, so that random sequences of them are almost valid calls.
pub(super) const OUTPUT_FRAGMENTS: &[&str] = &[
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
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<invoke name=\"time\">",
    "<parameter name=\"city\">",
    "</invoke>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<arg_key>days</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    "<｜DSML｜invoke name=\"time\">",
    "<｜DSML｜parameter name=\"days\" string=\"true\">",
    "<｜DSML｜parameter name=\"tags\" string=\"false\">",
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "functions.time:0<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "time(",
    "city='",
    "days=[1, True, {'a': None",
    ")",
    "'",
    "functools",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|python_start|>",
    "<|python_end|>",
    "```tool_code\n",
    "<function_calls>",
    "</function_calls>",
    "print(",
    "<function_call>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "call:time{",
    "<|start|>",
    "<|start|>assistant",
    "<|channel|>",
    "<|channel|>analysis",
    "commentary",
    "final",
    " to=functions.time",
    "<|constrain|>json",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "days:[",
    "days:",
    ",",
    "```",
    "json",
    "\\",
    "\r",
    "\0",
    "😀",
    "<",
    "x",
    MANY_SPACES,
    LONG_WORD,
];

/// Placeholders in `OUTPUT_FRAGMENTS` for a run of spaces and for a name that are longer than the text that a
/// parser holds back.
const MANY_SPACES: &str = "\u{1}";
const LONG_WORD: &str = "\u{2}";

proptest! {
    #[test]
    fn output_parsing_is_chunking_invariant(
        fragments in prop::collection::vec(0..OUTPUT_FRAGMENTS.len(), 0..40),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        syntax in 0..ToolCallSyntax::ALL.len(),
        start in 0..4_usize,
        max_calls in 1..3_u32,
    ) {
        let text: String = fragments.into_iter().map(|i| OUTPUT_FRAGMENTS[i]).collect();
        let text = expanded(&text);
        let starts = [ReasoningStart::AtMarker, ReasoningStart::Inside, ReasoningStart::After].map(Some);
        let start = [&starts[..], &[None]].concat()[start];
        let syntax = ToolCallSyntax::ALL[syntax];
        let whole = run(parser(syntax, start, max_calls), [text.as_str()]);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.index(text.len() + 1)).collect();
        cuts.extend([0, text.len()]);
        cuts.retain(|&cut| text.is_char_boundary(cut));
        cuts.sort_unstable();
        let parts = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]);
        prop_assert_eq!(&whole, &run(parser(syntax, start, max_calls), parts));
        let one_by_one = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
        prop_assert_eq!(&whole, &run(parser(syntax, start, max_calls), one_by_one));
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

/// Replaces the placeholders in a sequence of fragments.
fn expanded(text: &str) -> String {
    text.replace(MANY_SPACES, &" ".repeat(300)).replace(LONG_WORD, &"n".repeat(600))
}

/// Tool call in an output, and the offset at which its text begins.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ParsedCall {
    from: usize,
    name: String,
    arguments: String,
}

/// Sections of an output in order: content, and groups of adjacent calls. A malformed call counts as content
/// with the call's text.
#[derive(Debug, PartialEq, Eq)]
enum OutputSegment {
    Content(String),
    Calls(Vec<ParsedCall>),
}

fn runs(pieces: &OutputPieces, output: &str) -> Vec<OutputSegment> {
    let mut runs = Vec::new();
    let mut open = None;
    let add_content = |runs: &mut Vec<OutputSegment>, more: &str| match runs.last_mut() {
        Some(OutputSegment::Content(text)) => text.push_str(more),
        _ => runs.push(OutputSegment::Content(more.to_owned())),
    };
    for piece in pieces.iter() {
        match piece {
            OutputPiece::Content(text) => add_content(&mut runs, text),
            OutputPiece::Call { name, from, .. } => {
                let (name, arguments) = (name.to_owned(), String::new());
                open = Some(ParsedCall { from, name, arguments });
            }
            OutputPiece::Arguments { text, .. } => open.as_mut().unwrap().arguments.push_str(text),
            OutputPiece::End { .. } => match (runs.last_mut(), open.take().unwrap()) {
                (Some(OutputSegment::Calls(calls)), call) => calls.push(call),
                (_, call) => runs.push(OutputSegment::Calls(vec![call])),
            },
            OutputPiece::Broken { to, .. } => {
                add_content(&mut runs, &output[open.take().unwrap().from..to]);
            }
            OutputPiece::Reasoning(_) => unreachable!("reasoning is not parsed"),
        }
    }
    runs
}

/// Checks that an output is exactly its content and the texts of its calls: each group of calls is parsed again
/// from its text alone.
pub(super) fn check_sources(syntax: ToolCallSyntax, output: &str) -> Result<(), TestCaseError> {
    let parsed = |text: &str| runs(&run(parser(syntax, None, u32::MAX), [text]), text);
    let mut end = output.len();
    for one in parsed(output).iter().rev() {
        match one {
            OutputSegment::Content(text) => {
                prop_assert!(output[..end].ends_with(text), "{text:?} in {:?}", &output[..end]);
                end -= text.len();
            }
            OutputSegment::Calls(calls) => {
                let from = calls[0].from;
                let source = &output[from..end];
                let moved =
                    |call: &ParsedCall| ParsedCall { from: call.from - from, ..call.clone() };
                let alone = vec![OutputSegment::Calls(calls.iter().map(moved).collect())];
                prop_assert_eq!(parsed(source), alone, "{:?}", source);
                end = from;
            }
        }
    }
    prop_assert_eq!(end, 0, "{:?} is lost", &output[..end]);
    Ok(())
}

/// Syntaxes whose parser drops only the text of calls. In the harmony format, all markers are dropped; its
/// tests are in `harmony`.
pub(super) fn lossless_syntaxes() -> Vec<ToolCallSyntax> {
    let all = ToolCallSyntax::ALL.iter().copied();
    all.filter(|syntax| *syntax != ToolCallSyntax::Harmony).collect()
}

proptest! {
    #[test]
    fn content_and_calls_are_the_whole_output(
        fragments in prop::collection::vec(0..OUTPUT_FRAGMENTS.len(), 0..30),
        syntax in prop::sample::select(lossless_syntaxes()),
    ) {
        let text: String = fragments.into_iter().map(|i| OUTPUT_FRAGMENTS[i]).collect();
        check_sources(syntax, &expanded(&text))?;
    }

    /// If one character of a valid call is removed, doubled or replaced, no text is lost or duplicated.
    #[test]
    fn broken_calls_lose_and_double_no_text(
        syntax in prop::sample::select(lossless_syntaxes()),
        at in any::<prop::sample::Index>(),
        edit in 0..5_usize,
    ) {
        let text = valid_output(syntax);
        let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        let at = cuts[at.index(cuts.len())];
        let c = text[at..].chars().next().unwrap();
        let (before, after) = (&text[..at], &text[at + c.len_utf8()..]);
        let edited = match edit {
            0 => format!("{before}{after}"),
            1 => format!("{before}{c}{c}{after}"),
            2 => format!("{before}\n{after}"),
            3 => format!("{before}\u{1}{after}"),
            _ => before.to_owned(),
        };
        check_sources(syntax, &edited)?;
    }
}

/// Returns an output with two calls, and with content if the syntax allows content.
pub(super) fn valid_output(syntax: ToolCallSyntax) -> String {
    let json = |key: &str| {
        format!("{{\"name\": \"weather\", \"{key}\": {{\"city\": \"B\\n\", \"tags\": [1, {{}}]}}}}")
    };
    let arguments = "{\"city\": \"B\\n\", \"tags\": [1, {}]}";
    let list = format!("[{0}, {0}]", json("arguments"));
    let tags = "<function=weather>\n<parameter=city>\nB\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>";
    let invoke = "<invoke name=\"weather\">\n<parameter name=\"city\">B</parameter>\n</invoke>\n";
    let dsml = "<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">B</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n";
    let arg = "<arg_key>city</arg_key>\n<arg_value>B</arg_value>";
    match syntax {
        ToolCallSyntax::Hermes => {
            let call = format!("<tool_call>\n{}\n</tool_call>", json("arguments"));
            format!("a\n{call}\n{call} b\n")
        }
        ToolCallSyntax::Qwen3Coder => {
            format!("a <tool_call>\n{tags}\n</tool_call>\n<tool_call>{tags}</tool_call> b")
        }
        ToolCallSyntax::SeedOss => {
            format!(
                "a <seed:tool_call>\n{tags}\n</seed:tool_call>\n<seed:tool_call>{tags}</seed:tool_call> b"
            )
        }
        ToolCallSyntax::MiniMaxM2 => {
            format!("a <minimax:tool_call>\n{invoke}{invoke}</minimax:tool_call> b")
        }
        ToolCallSyntax::DeepSeekV32 => {
            format!("a\n\n<｜DSML｜function_calls>\n{dsml}{dsml}</｜DSML｜function_calls> b")
        }
        ToolCallSyntax::Glm45 | ToolCallSyntax::Glm47 => {
            format!(
                "a\n<tool_call>weather\n{arg}\n</tool_call>\n<tool_call>weather{arg}</tool_call> b"
            )
        }
        ToolCallSyntax::Llama3Json => format!("{0}; {0} b", json("parameters")),
        ToolCallSyntax::Pythonic => {
            "[weather(city='B\\n', tags=[1, {}]), weather(days=3)] b".to_owned()
        }
        ToolCallSyntax::ToolCode => {
            "a\n```tool_code\nweather(city='B\\n', tags=[1, {}])\nprint(weather(days=3))\n``` b"
                .to_owned()
        }
        ToolCallSyntax::Olmo3 => {
            "a <function_calls>weather(city='B\\n', tags=[1, {}])\nweather(days=3)</function_calls> b"
                .to_owned()
        }
        ToolCallSyntax::Granite20b => {
            let call = format!("<function_call> {}", json("arguments"));
            format!("a\n{call}\n{call} b")
        }
        ToolCallSyntax::Mistral => {
            format!(
                "a [TOOL_CALLS]{list} b [TOOL_CALLS]weather[ARGS]{arguments}[TOOL_CALLS]weather{arguments} c"
            )
        }
        ToolCallSyntax::DeepSeekV3 => {
            let call = format!(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
            );
            format!("a <｜tool▁calls▁begin｜>{call}\n{call}<｜tool▁calls▁end｜> b")
        }
        ToolCallSyntax::DeepSeekV31 => {
            let call =
                format!("<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>");
            format!("a <｜tool▁calls▁begin｜>{call}{call}<｜tool▁calls▁end｜> b")
        }
        ToolCallSyntax::KimiK2 => {
            let call = format!(
                "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
            );
            format!("a <|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|> b")
        }
        ToolCallSyntax::Granite => format!("<|tool_call|>{list} b"),
        ToolCallSyntax::Phi4Mini => {
            format!("a functools{list} b <|tool_call|>{list}<|/tool_call|>")
        }
        ToolCallSyntax::Xlam => format!("a\n```json\n{list}\n``` b"),
        ToolCallSyntax::FunctionGemma => {
            let call = "<start_function_call>call:weather{city:<escape>B\n<escape>,tags:[1,{}]}<end_function_call>";
            format!("a\n{call}{call} b")
        }
        ToolCallSyntax::Gemma4 => {
            let call = "<|tool_call>call:weather{city:<|\"|>B\n<|\"|>,tags:[1,{}]}<tool_call|>";
            format!("a\n{call}\n{call} b")
        }
        ToolCallSyntax::Harmony => {
            let to = "to=functions.weather";
            let first =
                format!("<|channel|>commentary {to} <|constrain|>json<|message|>{arguments}");
            let next = format!(" {to}<|channel|>commentary json<|message|>{arguments}");
            format!("a<|end|><|start|>assistant{first}<|call|><|start|>assistant{next}<|call|>b")
        }
    }
}

#[test]
fn valid_calls_are_all_parsed() {
    for &syntax in ToolCallSyntax::ALL {
        let text = valid_output(syntax);
        let runs = runs(&run(parser(syntax, None, u32::MAX), [text.as_str()]), &text);
        let calls = |run: &OutputSegment| match run {
            OutputSegment::Calls(calls) => {
                calls.iter().filter(|call| call.name == "weather").count()
            }
            OutputSegment::Content(text) => {
                assert!(text.trim().len() == 1, "{syntax:?} {text:?}");
                0
            }
        };
        let expected = if matches!(syntax, ToolCallSyntax::Mistral | ToolCallSyntax::Phi4Mini) {
            4
        } else {
            2
        };
        assert_eq!(runs.iter().map(calls).sum::<usize>(), expected, "{syntax:?} {runs:?}");
    }
}

#[test]
fn malformed_calls_are_content_as_written() {
    let call = |arguments: &str| {
        format!("<tool_call>\n{{\"name\": \"time\", \"arguments\": {arguments}}}\n</tool_call>")
    };
    let hermes = ["{\"a\": \"one\ntwo\"}", "{\"a\": tru}", "{\"a\": \"x\",}", "null", "\"{}\""];
    let mut outputs: Vec<(ToolCallSyntax, String)> =
        hermes.iter().map(|arguments| (ToolCallSyntax::Hermes, call(arguments))).collect();
    let nested = "<tool_call>\n<function=time>\n<parameter=city>\n<b>\n<parameter>x</parameter>\n</b>\n</parameter>\n</function>\n</tool_call>";
    outputs.push((ToolCallSyntax::Qwen3Coder, nested.to_owned()));
    let list = "[TOOL_CALLS][{\"name\": \"time\", \"arguments\": {\"a\": tru}}]";
    outputs.push((ToolCallSyntax::Mistral, list.to_owned()));
    for (syntax, output) in outputs {
        let runs = runs(&run(parser(syntax, None, u32::MAX), [output.as_str()]), &output);
        assert_eq!(runs, [OutputSegment::Content(output)]);
    }
}
