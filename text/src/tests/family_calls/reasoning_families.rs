//! Tests of the reasoning markers of the families.

use super::*;

/// Parses an output with the reasoning parser `name`; returns its text with the reasoning in parentheses.
fn mark_reasoning(name: &str, prompt: &str, output: &str) -> String {
    let family = ReasoningFamily::named(name).unwrap();
    let start = family.start_after_prompt(prompt);
    let options = ReasoningParserOptions { family, start };
    let (mut parser, mut pieces) =
        (OutputParser::new(Some(options), None), OutputPieces::default());
    parser.push(output, &mut pieces);
    parser.finish(&mut pieces);
    let text = |piece: OutputPiece<'_>| match piece {
        OutputPiece::Reasoning(text) => format!("({text})"),
        OutputPiece::Content(text) => text.to_owned(),
        other => panic!("{other:?}"),
    };
    pieces.iter().map(text).collect()
}

#[test]
fn reasoning_markers_depend_on_the_family() {
    let of = mark_reasoning;
    assert_eq!(of("seed_oss", "", "<seed:think>a</seed:think>b"), "(a)b");
    assert_eq!(of("mistral", "", "[THINK]a[/THINK]b"), "(a)b");
    assert_eq!(of("mistral", "", "b [THINK]"), "b [THINK]");
    assert_eq!(of("mistral", "x[THINK]", "a[/THINK]b"), "(a)b");
    let granite = "Here is my thought process: a\n\nHere's my response: b";
    assert_eq!(of("granite", "", granite), "( a\n\n) b");
    assert_eq!(of("granite", "", "Here's my answer: b"), "Here's my answer: b");
    assert_eq!(of("gemma4", "<|turn>model\n", "<|channel>thought\na\n<channel|>b"), "(a\n)b");
    assert_eq!(of("gemma4", "<|turn>model\n<|channel>thought\n", "a<channel|>b"), "(a)b");
    assert_eq!(of("gemma4", "<|channel>thought\n<channel|>", "b"), "b");
    assert_eq!(of("glm45", "<|assistant|>\n", "<think>a</think>b"), "(a)b");
    assert_eq!(of("glm47", "<|assistant|></think>", "b"), "b");
    assert_eq!(of("kimi_k2", "", "a</think>b"), "(a)b");
    assert_eq!(of("minimax_m2", "<think>\n", "a</think>b"), "(a)b");
    assert_eq!(ReasoningFamily::MISTRAL.trailing_reasoning("x[THINK]yz"), "yz");
    assert_eq!(
        ReasoningFamily::SEED_OSS.start_after_message("<seed:think>a</seed:think>"),
        ReasoningStart::After
    );
}
