//! Outputs of every tool call syntax that are cut at each position: into two chunks, which must not change the
//! result, and at their end, which must lose no text.

use super::output_parsers::{parser, parser_with, run};
use super::output_properties::{OUTPUT_FRAGMENTS, check_sources, lossless_syntaxes, valid_output};
use crate::{
    OutputParser, OutputPiece, ReasoningFamily, ReasoningParserOptions, ReasoningStart,
    ToolCallSyntax,
};
use proptest::prelude::*;

/// Maximum length of a random output in bytes. The time of a test grows with the square of the length.
const BYTES_MAX: usize = 160;

/// Returns all positions at which `text` can be cut.
fn cuts(text: &str) -> impl Iterator<Item = usize> {
    (0..=text.len()).filter(|&at| text.is_char_boundary(at))
}

/// Checks that no cut of an output into two chunks changes its pieces.
fn check_chunks(
    syntax: ToolCallSyntax,
    reasoning: Option<ReasoningParserOptions>,
    text: &str,
) -> Result<(), TestCaseError> {
    let whole = run(parser_with(syntax, reasoning, u32::MAX), [text]);
    for at in cuts(text) {
        let (head, tail) = text.split_at(at);
        let parts = run(parser_with(syntax, reasoning, u32::MAX), [head, tail]);
        prop_assert_eq!(&parts, &whole, "{:?} {:?}: {:?} | {:?}", syntax, reasoning, head, tail);
    }
    Ok(())
}

/// Checks that reasoning and content of an output without calls that ends at any position are the output, except
/// for the markers of the family and the white space around them. A marker that the end cuts is text.
fn check_sections(family: ReasoningFamily, text: &str) -> Result<(), TestCaseError> {
    let options = ReasoningParserOptions { family, start: ReasoningStart::AtMarker };
    for at in cuts(text) {
        let output = &text[..at];
        let pieces = run(OutputParser::new(Some(options), None), [output]);
        let mut parsed = String::new();
        for piece in pieces.iter() {
            match piece {
                OutputPiece::Content(text) | OutputPiece::Reasoning(text) => parsed += text,
                other => return Err(TestCaseError::fail(format!("{other:?} in {output:?}"))),
            }
        }
        let markers = family.all_markers().iter().flat_map(|one| [one.open, one.close]);
        let mut expected = output.to_owned();
        for marker in markers {
            expected = expected.replacen(marker, "", 1);
        }
        prop_assert_eq!(parsed, expected, "{:?}: {:?}", family, output);
    }
    Ok(())
}

/// Checks that an output that ends at any position is exactly its content and the texts of its calls. A call
/// that the end breaks counts as content with the call's text.
fn check_ends(syntax: ToolCallSyntax, text: &str) -> Result<(), TestCaseError> {
    cuts(text).try_for_each(|at| check_sources(syntax, &text[..at]))
}

/// Checks that the lines of all texts of a harmony output occur in the output, in order and without overlap.
/// The parser drops markers and headers, and separates messages by line breaks.
fn check_lines(text: &str) -> Result<(), TestCaseError> {
    for end in cuts(text) {
        let output = &text[..end];
        let mut rest = output;
        for piece in run(parser(ToolCallSyntax::HARMONY, None, u32::MAX), [output]).iter() {
            let (OutputPiece::Content(part)
            | OutputPiece::Reasoning(part)
            | OutputPiece::Arguments { text: part, .. }) = piece
            else {
                continue;
            };
            for line in part.split('\n') {
                let Some(at) = rest.find(line) else {
                    return Err(TestCaseError::fail(format!("{line:?} is not in {rest:?}")));
                };
                rest = &rest[at + line.len()..];
            }
        }
    }
    Ok(())
}

#[test]
fn valid_outputs_are_lossless_at_every_cut() {
    for syntax in ToolCallSyntax::all() {
        let text = valid_output(syntax);
        check_chunks(syntax, None, &text).unwrap();
        for family in ReasoningFamily::all() {
            let start = ReasoningStart::AtMarker;
            check_chunks(syntax, Some(ReasoningParserOptions { family, start }), &text).unwrap();
        }
    }
    for syntax in lossless_syntaxes() {
        check_ends(syntax, &valid_output(syntax)).unwrap();
    }
    check_lines(&valid_output(ToolCallSyntax::HARMONY)).unwrap();
}

/// Harmony is excluded: its parser drops all headers.
#[test]
fn reasoning_of_every_family_is_lossless_at_every_cut() {
    for family in ReasoningFamily::all() {
        for markers in family.all_markers() {
            let text = format!("{}I think ö <\n{}The answer [.", markers.open, markers.close);
            let harmony = "<|channel|>analysis<|message|>I think<|end|><|start|>assistant\
                <|channel|>final<|message|>The answer";
            let is_harmony = family == ReasoningFamily::HARMONY;
            let text = if is_harmony { harmony } else { &text };
            for start in [ReasoningStart::AtMarker, ReasoningStart::Inside, ReasoningStart::After] {
                let options = ReasoningParserOptions { family, start };
                check_chunks(ToolCallSyntax::HERMES, Some(options), text).unwrap();
            }
            if !is_harmony {
                check_sections(family, text).unwrap();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn random_outputs_are_lossless_at_every_cut(
        fragments in prop::collection::vec(prop::sample::select(OUTPUT_FRAGMENTS), 0..24),
        syntax in prop::sample::select(ToolCallSyntax::all()),
        family in prop::sample::select(ReasoningFamily::all()),
    ) {
        let mut text = String::new();
        for fragment in fragments {
            if text.len() + fragment.len() <= BYTES_MAX {
                text += fragment;
            }
        }
        check_chunks(syntax, None, &text)?;
        for start in [ReasoningStart::AtMarker, ReasoningStart::Inside] {
            check_chunks(syntax, Some(ReasoningParserOptions { family, start }), &text)?;
        }
        if syntax.is_harmony() {
            check_lines(&text)?;
        } else {
            check_ends(syntax, &text)?;
        }
    }
}
