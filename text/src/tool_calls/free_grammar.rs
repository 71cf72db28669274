//! Grammar of an output in which the model may choose whether to call tools, but calls of strict tools must
//! follow their schemas: free text up to a marker that opens calls, the calls, and free text again.

use super::call_grammar::{
    CallDelimiters, CallGrammarError, CallGrammarWriter, CallWrapperText, SpecialMarkerFn,
    add_common_rules, arguments_rule,
};
use super::syntax_kind::{ANY_ARGUMENTS, SyntaxKind};
use super::text_language::regex_literal;
use super::{ToolCallSyntax, ToolDefinition, harmony_grammar};
use grammar::lark_text::without;
use std::fmt::Write as _;

/// Regular expression of the beginning of a JSON object that is a call.
pub(super) const OBJECT_START: &str = "\\{\\s*\"(?:name|type|function|parameters|arguments|id)\"";

/// Positions at which calls can begin in a syntax.
#[derive(Debug, Default)]
pub(crate) struct ToolCallStarts {
    pub openings: Vec<CallOpening>,
    /// Regular expressions of the beginnings of calls that need no marker. Free text must not begin with a
    /// match of one of them.
    pub bare_starts: Vec<String>,
    /// Texts, in addition to the markers, that free text must not contain.
    pub excluded: Vec<&'static str>,
}

impl ToolCallStarts {
    /// Calls begin at markers.
    pub(super) fn marked(openings: Vec<CallOpening>) -> Self {
        Self { openings, ..Self::default() }
    }

    /// Calls begin at the start of the output, with a match of `start`.
    pub(super) fn at_start(
        start: String,
        excluded: &[&'static str],
        delimiters: CallDelimiters,
    ) -> Self {
        Self {
            openings: vec![CallOpening::list("", delimiters)],
            bare_starts: vec![start],
            excluded: excluded.to_vec(),
        }
    }
}

/// Marker after which calls follow. An empty marker means that calls can begin at the start of the output.
#[derive(Debug)]
pub(crate) struct CallOpening {
    marker: &'static str,
    delimiters: CallDelimiters,
    /// Whether several calls may follow one marker.
    is_list: bool,
    /// Whether each call is written without the tags that normally enclose it (`TagSyntax::wrapper`).
    is_bare: bool,
}

impl CallOpening {
    /// Returns the opening for `marker`, followed by a list of calls.
    pub(super) fn list(marker: &'static str, delimiters: CallDelimiters) -> Self {
        Self { marker, delimiters, is_list: true, is_bare: false }
    }

    /// Returns the opening for `marker`, followed by a single call.
    pub(super) fn single(marker: &'static str) -> Self {
        Self { is_list: false, ..Self::list(marker, CallDelimiters::default()) }
    }

    /// Returns the opening for `marker`, followed by a single call without enclosing tags.
    pub(super) fn bare(marker: &'static str) -> Self {
        Self { is_bare: true, ..Self::single(marker) }
    }
}

/// Returns the pattern of the name of any of `tools`.
pub(super) fn name_pattern(tools: &[&ToolDefinition]) -> String {
    let names = tools.iter().map(|tool| regex_literal(&tool.name));
    names.collect::<Vec<_>>().join("|")
}

/// Builds the grammar of free text and calls of any of `tools`; without `multiple`, of at most one call. The
/// arguments of non-strict tools are not constrained.
///
/// Errors: this syntax cannot represent the arguments of a strict tool as its schema requires.
pub(super) fn free_grammar<'a>(
    syntax: ToolCallSyntax,
    tools: impl IntoIterator<Item = &'a ToolDefinition>,
    multiple: bool,
    special: SpecialMarkerFn<'_>,
) -> Result<String, CallGrammarError> {
    let (kind, mut writer) = (syntax.kind(), CallGrammarWriter::new(syntax, special));
    let tools: Vec<&ToolDefinition> = tools.into_iter().collect();
    let mut has_any = false;
    for (index, tool) in tools.iter().enumerate() {
        if tool.is_strict {
            kind.add_arguments(index, tool, &mut writer)?;
            writer.check_length()?;
        } else {
            has_any = true;
            writer.rule(&arguments_rule(index), ANY_ARGUMENTS);
        }
    }
    if has_any {
        kind.add_any_arguments(&mut writer);
    }
    add_common_rules(syntax, &mut writer);
    let mut grammar = FreeCallGrammarBuilder { kind, tools, multiple, writer };
    let start = grammar.start();
    grammar.writer.check_length()?;
    Ok(format!("start: {start}\n{}", grammar.writer.rules))
}

/// Builds the grammar of outputs in which free text and tool calls alternate.
struct FreeCallGrammarBuilder<'a> {
    kind: &'static dyn SyntaxKind,
    tools: Vec<&'a ToolDefinition>,
    multiple: bool,
    writer: CallGrammarWriter<'a>,
}

impl FreeCallGrammarBuilder<'_> {
    /// Adds all rules and returns the right-hand side of the rule `start`.
    fn start(&mut self) -> String {
        let Some(starts) = self.kind.starts(&self.tools, &self.writer) else {
            let calls = self.calls(0, &CallOpening::single(""));
            return harmony_grammar::free_messages(&calls, &mut self.writer);
        };
        let ToolCallStarts { openings, bare_starts, excluded } = starts;
        let markers = openings.iter().map(|opening| opening.marker).chain(excluded);
        let markers: Vec<String> =
            markers.filter(|marker| !marker.is_empty()).map(str::to_owned).collect();
        let mut starts = String::new();
        for start in &bare_starts {
            // Writing to a string cannot fail, so the result is ignored.
            let _ = write!(starts, " & ~/\\s*{start}(?s:.*)/");
        }
        self.writer.rule("FREE", &format!("{}{starts}", without(&markers)));
        let mut chunks = Vec::new();
        for (at, opening) in openings.iter().enumerate() {
            let calls = self.calls(at, opening);
            if opening.marker.is_empty() {
                return format!("FREE | {calls}");
            }
            let others: Vec<String> =
                markers.iter().filter(|marker| *marker != opening.marker).cloned().collect();
            let head = self.writer.text_up_to(&format!("HEAD_{at}"), opening.marker, &others);
            chunks.push(format!("{head} {calls}"));
        }
        self.writer.rule("chunk", &chunks.join(" | "));
        format!("chunk{} FREE", if self.multiple { "*" } else { "?" })
    }

    /// Returns the Lark expression of the calls after an opening marker.
    fn calls(&mut self, at: usize, opening: &CallOpening) -> String {
        let CallOpening { marker, delimiters, is_list, .. } = opening;
        let texts: Vec<CallWrapperText> =
            self.tools.iter().map(|tool| self.call_text(&tool.name, opening)).collect();
        let written = |open: &str, read: &str| {
            let one = |(index, text): (usize, &CallWrapperText)| {
                text.written(open, read, &arguments_rule(index), &self.writer)
            };
            texts.iter().enumerate().map(one).collect::<Vec<_>>().join(" | ")
        };
        let (first, next) = (written(&delimiters.open, marker), written("", ""));
        let between = self.writer.text(&delimiters.between);
        let close = self.writer.text(&delimiters.close);
        self.writer.rule(&format!("first_{at}"), &first);
        let mut more = String::new();
        if *is_list && self.multiple && self.kind.allows_several() {
            self.writer.rule(&format!("next_{at}"), &next);
            more = format!("({between} next_{at})*");
        }
        format!("first_{at} {more} {close}")
    }

    fn call_text(&self, name: &str, opening: &CallOpening) -> CallWrapperText {
        if opening.is_bare {
            self.kind.bare_call_text(name, &self.writer)
        } else {
            self.kind.call_text(name, &self.writer)
        }
    }
}
