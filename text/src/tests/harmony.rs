//! The harmony format of gpt-oss: messages in all forms of their headers, malformed headers and calls, special
//! tokens, and the position relative to the reasoning.

use super::output_parsers::{run, show, tools};
use super::{added, byte_level, load};
use crate::{
    CallEnforcement, DetokenizeOptions, Detokenizer, OutputParser, OutputParserConfig, OutputPiece,
    OutputPieces, ReasoningFamily, ReasoningParserOptions, ReasoningStart, Tokenizer,
    ToolCallParserOptions, ToolCallSyntax,
};
use expect_test::{Expect, expect};
use grammar::{ReasoningState, ReasoningTracker as _};
use std::sync::Arc;

/// Header forms of a message to `functions.NAME`. `{}` is the name of the function.
pub(super) const CALL_HEADERS: &[&str] = &[
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{}<|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{} json<|message|>",
    "<|channel|>commentary to=functions.{}<|message|>",
    "<|channel|>analysis to=functions.{} code<|message|>",
    " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary json<|message|>",
    " to=functions.{}<|channel|>analysis<|constrain|>json<|message|>",
    " to=functions.{} <|channel|>commentary<|message|>",
    "<|channel|>commentary functions.{} <|constrain|>json<|message|>",
    "<|channel|>commentary to={}<|message|>",
];

pub(super) fn parser(start: ReasoningStart, calls: bool) -> OutputParser {
    let reasoning = ReasoningParserOptions { family: ReasoningFamily::HARMONY, start };
    let (syntax, tools) = (ToolCallSyntax::HARMONY, &tools());
    let (max_calls, enforcement) = (u32::MAX, CallEnforcement::None);
    let options = ToolCallParserOptions { syntax, tools, max_calls, enforcement };
    OutputParser::new(Some(reasoning), Some(options).filter(|_| calls))
}

fn check(text: &str, expected: &Expect) {
    let pieces = run(parser(ReasoningStart::AtMarker, true), [text]);
    expected.assert_eq(&show(&pieces, text));
}

#[test]
fn channels_are_reasoning_and_content() {
    check(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.\n<|end|><|start|>assistant<|channel|>final<|message|> Hi <b> |> <|<|return|>",
        &expect![[r#"
            reasoning "Hm.\nSo."
            content "I look.\n\n Hi <b> |> <|"
        "#]],
    );
    check(
        "<|channel|>final <|constrain|>json<|message|>{\"a\": 1}",
        &expect![[r#"
            content "{\"a\": 1}"
        "#]],
    );
    check(
        "<|message|>a<|end|> \n<|start|>assistant<|channel|>unknown<|message|>b<|end|><|start|>assistant<|message|>c",
        &expect![[r#"
            content "a\nb\nc"
        "#]],
    );
}

#[test]
fn messages_that_are_not_for_the_user_are_reasoning() {
    check(
        "<|channel|>analysis to=browser.search code<|message|>{\"query\": \"x\"}<|call|><|start|>browser.search to=assistant<|channel|>analysis<|message|>found<|end|><|start|>user<|message|>and?<|end|><|start|>assistant to=python<|channel|>commentary<|message|>1<|end|><|start|>assistant to=all<|channel|>final<|message|>b",
        &expect![[r#"
            reasoning "{\"query\": \"x\"}\nfound\nand?\n1"
            content "b"
        "#]],
    );
}

#[test]
fn all_forms_of_call_headers_are_parsed() {
    let call = |header: &str, name: &str| header.replace("{}", name) + "{\"city\": \"<|end|>\"}";
    let expected = expect![[r#"
        reasoning "a"
        call 0 weather
          0 {"city": "<|end|>"}
        end 0
        call 1 time
          1 {"city": "<|end|>"}
        end 1
    "#]];
    for header in CALL_HEADERS {
        for end in ["<|call|>", " \n<|call|>", "<|end|>"] {
            let before = "<|channel|>analysis<|message|>a<|end|><|start|>assistant";
            let (first, second) = (call(header, "weather"), call(header, "time"));
            check(&format!("{before}{first}{end}<|start|>assistant{second}"), &expected);
        }
        let text = call(header, "time");
        let pieces = run(parser(ReasoningStart::AtMarker, true), [text.as_str()]);
        let alone = "call 0 time\n  0 {\"city\": \"<|end|>\"}\nend 0\n";
        assert_eq!(show(&pieces, &text), alone, "{header}");
    }
}

#[test]
fn call_names_may_have_punctuation() {
    check(
        "<|channel|>commentary to=functions.mcp/a.b:1-x<|message|>\n{}<|call|>",
        &expect![[r"
            call 0 mcp/a.b:1-x
              0 {}
            end 0
        "]],
    );
}

#[test]
fn calls_without_tools_are_content() {
    let text = "<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}<|call|>";
    let pieces = run(parser(ReasoningStart::AtMarker, false), [text]);
    assert_eq!(show(&pieces, text), "content \"{}\"\n");
}

#[test]
fn malformed_calls_and_headers_are_content() {
    check(
        "<|channel|>commentary to=functions.time <|constrain|>json<|message|>{\"a\": tru}<|call|>b",
        &expect![[r#"
            call 0 time
              0 {"a": tru
            broken 0 "<|channel|>commentary to=functions.time <|constrain|>json<|message|>{\"a\": tru"
            content "}\nb"
        "#]],
    );
    check(
        "<|channel|>analysis to=functions.time code<|message|> print(1)<|call|>",
        &expect![[r#"
            content "<|channel|>analysis to=functions.time code<|message|> print(1)"
        "#]],
    );
    check(
        "<|channel|>commentary to=functions.time<|message|><|call|>",
        &expect![[r#"
            content "<|channel|>commentary to=functions.time<|message|>"
        "#]],
    );
    // Without `<|message|>`.
    check(
        "<|channel|>analysis We think.<|end|><|start|>assistant<|channel|>commentary Hello<|end|><|start|>assistant<|channel|>final\nHi to you<|return|>",
        &expect![[r#"
            reasoning "We think."
            content "Hello\n\nHi to you"
        "#]],
    );
    check(
        "<|channel|>commentary to=functions.time {\"a\": 1}<|call|>",
        &expect![[r#"
            call 0 time
              0 {"a": 1}
            end 0
        "#]],
    );
    check(
        "<|channel|>analysis, hm<|end|><|start|>assistant<|channel|>final{\"a\": 1}<|return|>",
        &expect![[r#"
            reasoning ", hm"
            content "{\"a\": 1}"
        "#]],
    );
    // Text that mentions a marker.
    check(
        "<|channel|>final<|message|>Use `<|start|>`, <|channel|> \"x\" and <|message|> or <|constrain|>.<|return|>",
        &expect![[r#"
            content "Use `<|start|>`, <|channel|> \"x\" and <|message|> or <|constrain|>."
        "#]],
    );
    check(
        "<|channel|>analysis<|message|>Use `<|start|>`.<|channel|>final<|message|>a<|start|>assistant<|channel|>final<|message|>b",
        &expect![[r#"
            reasoning "Use `<|start|>`."
            content "a\nb"
        "#]],
    );
    let name = "n".repeat(600);
    let long = format!("<|channel|>final<|constrain|>{name}<|message|>");
    let pieces = run(parser(ReasoningStart::AtMarker, true), [long.as_str()]);
    assert_eq!(show(&pieces, &long), format!("content \"{name}<|message|>\"\n"));
}

#[test]
fn text_without_a_header_is_content() {
    for text in ["Hello", " to the", "to=", "t", "\n\n{\"a\": 1}", "<", "<|x|>", "to=functions.f x"]
    {
        let pieces = run(parser(ReasoningStart::AtMarker, false), [text]);
        let content: Vec<OutputPiece<'_>> = pieces.iter().collect();
        assert_eq!(content, [OutputPiece::Content(text)]);
    }
    let inside = run(parser(ReasoningStart::Inside, true), ["a<|end|>b"]);
    assert!(inside.iter().eq([OutputPiece::Reasoning("a"), OutputPiece::Content("b")]));
    let after = run(
        parser(ReasoningStart::After, true),
        ["a<|start|>assistant<|channel|>analysis<|message|>b"],
    );
    assert!(after.iter().eq([OutputPiece::Content("a"), OutputPiece::Reasoning("b")]));
}

#[test]
fn prompts_determine_the_first_section() {
    let of = |tail: &str| ReasoningFamily::HARMONY.start_after_prompt(tail);
    assert_eq!(of("hi<|end|><|start|>assistant"), ReasoningStart::AtMarker);
    assert_eq!(of("<|start|>assistant<|channel|>analysis<|message|>"), ReasoningStart::Inside);
    assert_eq!(of("<|start|>assistant<|channel|>final<|message|>"), ReasoningStart::After);
    assert_eq!(of("<|start|>assistant<|channel|>final<|message|>{\"a\": "), ReasoningStart::After);
    assert_eq!(of("another template"), ReasoningStart::AtMarker);
    assert_eq!(ReasoningFamily::HARMONY.start_after_message("So"), ReasoningStart::After);
    assert_eq!(ReasoningFamily::HARMONY.start_after_message(""), ReasoningStart::After);
}

/// Returns a tokenizer with the markers as special tokens, and their ids in the order of the syntax.
pub(super) fn tokenizer() -> Arc<Tokenizer> {
    let mut files = byte_level();
    let tokens = files.tokenizer["added_tokens"].as_array_mut().unwrap();
    for marker in ToolCallSyntax::HARMONY.special_markers() {
        let id = tokens.iter().filter_map(|token| token["id"].as_u64()).max().unwrap() + 1;
        tokens.push(added(id as usize, marker, true));
    }
    Arc::new(load(&files).1)
}

#[test]
fn markers_stay_visible_to_the_parser() {
    let tokenizer = tokenizer();
    let (calls, family) = (ToolCallSyntax::HARMONY, ReasoningFamily::HARMONY);
    let config = OutputParserConfig::new(Some(calls), Some(family), &tokenizer);
    let text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>";
    for calls in [false, true] {
        let mut detokenizer =
            Detokenizer::new(Arc::clone(&tokenizer), DetokenizeOptions::default())
                .with_visible_special(config.visible_special(calls));
        let (mut parser, mut pieces) =
            (parser(ReasoningStart::AtMarker, calls), OutputPieces::default());
        for token in tokenizer.encode(text, false).unwrap() {
            let mut part = String::new();
            detokenizer.push(token, &mut part);
            parser.push(&part, &mut pieces);
        }
        parser.finish(&mut pieces);
        assert!(pieces.iter().eq([OutputPiece::Reasoning("a"), OutputPiece::Content("b")]));
    }
}

#[test]
fn tracker_follows_every_reasoning_message() {
    let tokenizer = tokenizer();
    let config = OutputParserConfig::new(None, Some(ReasoningFamily::HARMONY), &tokenizer);
    let detokenizer = Detokenizer::new(Arc::clone(&tokenizer), DetokenizeOptions::default())
        .with_visible_special(config.visible_special(false));
    let mut tracker =
        parser(ReasoningStart::AtMarker, true).reasoning_reader(detokenizer.clone()).unwrap();
    let inside = ReasoningState::Inside { at_character_boundary: true };
    for (text, state) in [
        ("<|channel|>analysis", ReasoningState::Before),
        ("<|message|>", inside),
        ("a", inside),
        ("<|end|>", ReasoningState::Before),
        ("<|start|>assistant<|channel|>commentary<|message|>b", ReasoningState::Before),
        ("<|end|><|start|>assistant<|channel|>analysis<|message|>", inside),
        ("<|end|><|start|>assistant<|channel|>final<|message|>", ReasoningState::After),
    ] {
        tokenizer.encode(text, false).unwrap().into_iter().for_each(|token| tracker.push(token));
        assert_eq!(tracker.state(), state, "{text}");
    }
    assert!(parser(ReasoningStart::After, true).reasoning_reader(detokenizer).is_none());
}
