//! Outputs in the harmony format that are cut at every position, and outputs that OpenAI's parser has read.

use super::harmony::{CALL_HEADERS, parser};
use super::output_parsers::run;
use crate::{OutputPiece, OutputPieces, ReasoningStart};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;

/// Message of an output, in the order of the format.
#[derive(Debug, Clone)]
enum OutputMessage {
    Reasoning(String),
    Preamble(String),
    Answer(String),
    /// Call of `time` with the form of its header, an index of `CALL_HEADERS`, and its arguments.
    Call(usize, String),
}

/// Parts of a message as the model writes them.
struct WrittenMessage {
    header: String,
    text: String,
    end: &'static str,
}

impl OutputMessage {
    fn written(&self, is_first: bool) -> WrittenMessage {
        let start = if is_first { "" } else { "<|start|>assistant" };
        let (header, text, end) = match self {
            Self::Reasoning(text) => ("<|channel|>analysis<|message|>".to_owned(), text, "<|end|>"),
            Self::Preamble(text) => {
                ("<|channel|>commentary<|message|>".to_owned(), text, "<|end|>")
            }
            Self::Answer(text) => ("<|channel|>final<|message|>".to_owned(), text, "<|return|>"),
            Self::Call(form, text) => (CALL_HEADERS[*form].replace("{}", "time"), text, "<|call|>"),
        };
        WrittenMessage { header: format!("{start}{header}"), text: text.clone(), end }
    }
}

/// Text of the sections of an output, and what remains of its calls.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct OutputTexts {
    reasoning: String,
    content: String,
    /// Arguments of the complete calls.
    calls: Vec<String>,
    /// Arguments of the call that the end of the output cuts off.
    broken: Option<String>,
}

impl OutputTexts {
    fn of(pieces: &OutputPieces) -> Self {
        let (mut texts, mut open) = (Self::default(), String::new());
        for piece in pieces.iter() {
            match piece {
                OutputPiece::Reasoning(text) => texts.reasoning.push_str(text),
                OutputPiece::Content(text) => texts.content.push_str(text),
                OutputPiece::Call { name, .. } => assert_eq!(name, "time"),
                OutputPiece::Arguments { text, .. } => open.push_str(text),
                OutputPiece::End { .. } => texts.calls.push(std::mem::take(&mut open)),
                OutputPiece::Broken { .. } => texts.broken = Some(std::mem::take(&mut open)),
            }
        }
        texts
    }

    /// Adds the part `text` of a message; `is_whole` = the message is not cut.
    fn add(&mut self, message: &OutputMessage, text: &str, is_whole: bool) {
        let join = |all: &mut String| {
            if !all.is_empty() && !text.is_empty() {
                all.push('\n');
            }
            all.push_str(text);
        };
        match message {
            OutputMessage::Reasoning(_) => join(&mut self.reasoning),
            OutputMessage::Preamble(_) | OutputMessage::Answer(_) => join(&mut self.content),
            OutputMessage::Call(..) if is_whole => self.calls.push(text.to_owned()),
            OutputMessage::Call(..) => self.broken = Some(text.to_owned()),
        }
    }
}

/// Splits `output` into chunks of about `bytes` bytes.
fn chunks(output: &str, bytes: usize) -> Vec<&str> {
    let mut chunks = Vec::new();
    let mut rest = output;
    while !rest.is_empty() {
        let (head, tail) = rest.split_at(rest.ceil_char_boundary(bytes.min(rest.len())));
        chunks.push(head);
        rest = tail;
    }
    chunks
}

/// Checks the sections of an output that is cut at each position, except inside the first marker of a message.
fn check_cuts(messages: &[OutputMessage], chunk: usize) {
    let (mut output, mut expected) = (String::new(), OutputTexts::default());
    let check = |output: &str, expected: &OutputTexts| {
        let pieces = run(parser(ReasoningStart::AtMarker, true), chunks(output, chunk));
        assert_eq!(OutputTexts::of(&pieces), *expected, "{output:?}");
    };
    for (at, message) in messages.iter().enumerate() {
        let WrittenMessage { header, text, end } = message.written(at == 0);
        let before = output.clone();
        for (cut, _) in header.char_indices() {
            // A header is dropped. Text before the first marker of the output is content.
            if header[..cut].contains("|>") {
                check(&format!("{before}{}", &header[..cut]), &expected);
            }
        }
        output += &header;
        for (cut, _) in text.char_indices() {
            let mut cut_off = expected.clone();
            cut_off.add(message, &text[..cut], false);
            check(&format!("{output}{}", &text[..cut]), &cut_off);
        }
        expected.add(message, &text, true);
        output += &text;
        check(&output, &expected);
        output += end;
        check(&output, &expected);
    }
}

#[test]
fn cut_outputs_keep_their_sections() {
    let text = |text: &str| text.to_owned();
    let arguments = "{\"city\": \"Kö\\\"ln <|end|>\", \"tags\": [1, {}]}";
    for form in 0..CALL_HEADERS.len() {
        let call = OutputMessage::Call(form, text(arguments));
        check_cuts(&[call.clone(), OutputMessage::Answer(text("So é."))], 3);
        let messages = [
            OutputMessage::Reasoning(text("Hm é <b>\n")),
            OutputMessage::Reasoning(text("Call |it.")),
            OutputMessage::Preamble(text("I look. ")),
            call,
        ];
        check_cuts(&messages, 7);
        check_cuts(&messages, usize::MAX);
    }
}

fn message() -> impl Strategy<Value = OutputMessage> {
    let text = || "[a-z {}\"|>é\n]{1,12}";
    let arguments = "[a-z é<|>]{0,9}".prop_map(|city| json!({"city": city}).to_string());
    prop_oneof![
        text().prop_map(OutputMessage::Reasoning),
        text().prop_map(OutputMessage::Preamble),
        text().prop_map(OutputMessage::Answer),
        (0..CALL_HEADERS.len(), arguments)
            .prop_map(|(form, arguments)| OutputMessage::Call(form, arguments)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_messages_are_parsed_at_every_cut(
        messages in prop::collection::vec(message(), 1..5),
        chunk in 1..20_usize,
    ) {
        check_cuts(&messages, chunk);
    }

    /// Text without markers is never lost, whatever surrounds it.
    #[test]
    fn headerless_text_is_content(text in "[a-z=.:{}\" \n<|>é]{0,40}") {
        let pieces = run(parser(ReasoningStart::AtMarker, true), [text.as_str()]);
        let content: String = pieces.iter().map(|piece| match piece {
            OutputPiece::Content(text) => text.to_owned(),
            other => panic!("{other:?}"),
        }).collect();
        let expected = if text.trim().is_empty() { "" } else { text.as_str() };
        prop_assert_eq!(content, expected);
    }
}

/// The cases were written by `tests/conformance/harmony/generate.py` with OpenAI's parser.
#[test]
fn openai_harmony_reads_the_same_messages() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/conformance/harmony/cases.json");
    let cases: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let cases = cases.as_array().unwrap();
    assert!(cases.len() > 100);
    for case in cases {
        let output = case["output"].as_str().unwrap();
        let pieces = run(parser(ReasoningStart::AtMarker, true), [output]);
        let mut parsed = json!({"output": output, "reasoning": "", "content": "", "calls": [], "cut_call": null});
        let mut open = Value::Null;
        let add = |to: &mut Value, text: &str| {
            *to = Value::from(to.as_str().unwrap().to_owned() + text);
        };
        for piece in pieces.iter() {
            match piece {
                OutputPiece::Reasoning(text) => add(&mut parsed["reasoning"], text),
                OutputPiece::Content(text) => add(&mut parsed["content"], text),
                OutputPiece::Call { name, .. } => open = json!({"name": name, "arguments": ""}),
                OutputPiece::Arguments { text, .. } => add(&mut open["arguments"], text),
                OutputPiece::End { .. } => {
                    parsed["calls"].as_array_mut().unwrap().push(open.take());
                }
                OutputPiece::Broken { .. } => parsed["cut_call"] = open.take(),
            }
        }
        assert_eq!(parsed, *case);
    }
}
