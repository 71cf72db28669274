//! Properties of the output parsers for random outputs: the result does not depend on the chunking, and the
//! content and the texts of the calls together are the whole output.

mod valid_outputs;

use super::output_parsers::{parser, parser_with, run};
use crate::{
    OutputPiece, OutputPieces, ReasoningFamily, ReasoningParserOptions, ReasoningStart,
    ToolCallSyntax,
};
use proptest::prelude::*;
pub(super) use valid_outputs::valid_output;

/// Fragments of every tool call syntax, so that random sequences of them are almost valid calls.
pub(super) const OUTPUT_FRAGMENTS: &[&str] = &[
    "<think>",
    "</think>",
    "<seed:think>",
    "</seed:think>",
    "<|channel>thought\n",
    "<channel|>",
    "[THINK]",
    "[/THINK]",
    "Here is my thought process:",
    "Here's my response:",
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
    "\ntime\n{",
    "<|assistant|>",
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
        syntax in prop::sample::select(ToolCallSyntax::all()),
        start in 0..4_usize,
        family in prop::sample::select(ReasoningFamily::all()),
        max_calls in 1..3_u32,
    ) {
        let text: String = fragments.into_iter().map(|i| OUTPUT_FRAGMENTS[i]).collect();
        let text = expanded(&text);
        let starts = [ReasoningStart::AtMarker, ReasoningStart::Inside, ReasoningStart::After].map(Some);
        let start = [&starts[..], &[None]].concat()[start];
        let reasoning = start.map(|start| ReasoningParserOptions { family, start });
        let whole = run(parser_with(syntax, reasoning, max_calls), [text.as_str()]);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.index(text.len() + 1)).collect();
        cuts.extend([0, text.len()]);
        cuts.retain(|&cut| text.is_char_boundary(cut));
        cuts.sort_unstable();
        let parts = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]);
        prop_assert_eq!(&whole, &run(parser_with(syntax, reasoning, max_calls), parts));
        let one_by_one = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
        prop_assert_eq!(&whole, &run(parser_with(syntax, reasoning, max_calls), one_by_one));
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
    ToolCallSyntax::all().into_iter().filter(|syntax| !syntax.is_harmony()).collect()
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
