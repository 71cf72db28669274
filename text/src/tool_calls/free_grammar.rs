//! Grammar of an output in which the model may choose whether to call tools, but calls of strict tools must
//! follow their schemas: free text up to a marker that opens calls, the calls, and free text again.

use super::call_grammar::{
    CallDelimiters, CallGrammarError, CallGrammarWriter, CallWrapperText, SpecialMarkerFn,
    add_arguments, add_common_rules, allows_several, call_text, delimiters,
};
use super::json_lists::PHI4_MINI;
use super::text_language::regex_literal;
use super::{ToolCallSyntax, ToolDefinition, hermes, llama3_json, mistral, named_lines, pythonic};
use super::{delimited_grammar, harmony_grammar, python_grammar, tag_grammar};
use grammar::lark_text::without;
use serde_json::json;
use std::fmt::Write as _;

/// Regular expression of the beginning of a JSON object that is a call.
const OBJECT_START: &str = "\\{\\s*\"(?:name|type|function|parameters|arguments|id)\"";

/// Positions at which calls can begin in a syntax.
struct ToolCallStarts {
    openings: Vec<CallOpening>,
    /// Regular expressions of the beginnings of calls that need no marker. Free text must not begin with a
    /// match of one of them.
    bare_starts: Vec<String>,
    /// Texts, in addition to the markers, that free text must not contain.
    excluded: Vec<&'static str>,
}

/// Marker after which calls follow. An empty marker means that calls can begin at the start of the output.
struct CallOpening {
    marker: &'static str,
    delimiters: CallDelimiters,
    /// Whether several calls may follow one marker.
    is_list: bool,
    /// Whether each call is written without the tags that normally enclose it (`TagSyntax::wrapper`).
    is_bare: bool,
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
    let mut writer = CallGrammarWriter::new(syntax, special);
    let tools: Vec<&ToolDefinition> = tools.into_iter().collect();
    let mut has_any = false;
    for (index, tool) in tools.iter().enumerate() {
        if tool.is_strict {
            add_arguments(syntax, index, tool, &mut writer)?;
        } else {
            has_any = true;
            writer.rule(&format!("args_{index}"), "any_args");
        }
    }
    if has_any {
        add_any_arguments(syntax, &mut writer);
    }
    add_common_rules(syntax, &mut writer);
    let mut grammar = FreeCallGrammarBuilder { syntax, tools, multiple, writer };
    let start = grammar.start();
    grammar.writer.check_length()?;
    Ok(format!("start: {start}\n{}", grammar.writer.rules))
}

/// Adds the rule `any_args`, which accepts any arguments.
fn add_any_arguments(syntax: ToolCallSyntax, writer: &mut CallGrammarWriter<'_>) {
    let body = if let Some(tags) = syntax.tags() {
        tag_grammar::any_parameters(tags, writer)
    } else if let Some(delimited) = syntax.delimited() {
        delimited_grammar::any_object(delimited, writer)
    } else if syntax.is_pythonic() {
        python_grammar::any_arguments(writer)
    } else {
        return writer.json_rule("any_args", &json!({"type": "object"}));
    };
    writer.rule("any_args", &body);
}

/// Builds the grammar of outputs in which free text and tool calls alternate.
struct FreeCallGrammarBuilder<'a> {
    syntax: ToolCallSyntax,
    tools: Vec<&'a ToolDefinition>,
    multiple: bool,
    writer: CallGrammarWriter<'a>,
}

impl FreeCallGrammarBuilder<'_> {
    /// Adds all rules and returns the right-hand side of the rule `start`.
    fn start(&mut self) -> String {
        if self.syntax == ToolCallSyntax::Harmony {
            let calls = self.calls(0, &single("", false));
            return harmony_grammar::free_messages(&calls, &mut self.writer);
        }
        let ToolCallStarts { openings, bare_starts, excluded } = self.openings();
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
                text.written(open, read, &format!("args_{index}"), &self.writer)
            };
            texts.iter().enumerate().map(one).collect::<Vec<_>>().join(" | ")
        };
        let (first, next) = (written(&delimiters.open, marker), written("", ""));
        let between = self.writer.text(&delimiters.between);
        let close = self.writer.text(&delimiters.close);
        self.writer.rule(&format!("first_{at}"), &first);
        let mut more = String::new();
        if *is_list && self.multiple && allows_several(self.syntax) {
            self.writer.rule(&format!("next_{at}"), &next);
            more = format!("({between} next_{at})*");
        }
        format!("first_{at} {more} {close}")
    }

    fn call_text(&self, name: &str, opening: &CallOpening) -> CallWrapperText {
        match self.syntax.tags().filter(|_| opening.is_bare) {
            Some(tags) => {
                let tags = super::tag_syntax::TagSyntax { wraps_each_call: false, ..*tags };
                tag_grammar::call_tags(&tags, name)
            }
            None => call_text(self.syntax, name, &self.writer),
        }
    }

    /// Returns the pattern of the start of a list of Python calls.
    fn pythonic_start(&self) -> String {
        format!("\\[\\s*(?:{})\\s*\\(", self.name_pattern())
    }

    /// Returns the pattern of a text up to the arguments of a call after the line of its name.
    fn glm_start(&self) -> String {
        format!("(?:(?s:.*)\\n\\s*)?(?:{})[ \\t\\r]*\\n\\s*\\{{", self.name_pattern())
    }

    /// Returns the pattern of the name of any tool.
    fn name_pattern(&self) -> String {
        let names = self.tools.iter().map(|tool| regex_literal(&tool.name));
        names.collect::<Vec<_>>().join("|")
    }

    fn openings(&self) -> ToolCallStarts {
        let marked =
            |openings| ToolCallStarts { openings, bare_starts: Vec::new(), excluded: Vec::new() };
        let array_start = format!("\\[\\s*{OBJECT_START}");
        let at_start = |start: String, excluded: Vec<&'static str>| ToolCallStarts {
            openings: vec![self.list("")],
            bare_starts: vec![start],
            excluded,
        };
        match self.syntax {
            ToolCallSyntax::Mistral if self.writer.has_special(mistral::ARGS) => {
                marked(vec![single(mistral::CALLS, false)])
            }
            ToolCallSyntax::Mistral => marked(vec![self.list(mistral::CALLS)]),
            ToolCallSyntax::Granite => ToolCallStarts {
                bare_starts: vec![array_start],
                ..marked(self.array_openings(&["<|tool_call|>", hermes::OPEN]))
            },
            ToolCallSyntax::Phi4Mini => marked(self.array_openings(PHI4_MINI.openers)),
            ToolCallSyntax::Xlam => at_start(array_start, vec!["```", hermes::OPEN]),
            ToolCallSyntax::Llama3Json => at_start(OBJECT_START.to_owned(), vec![llama3_json::TAG]),
            ToolCallSyntax::Pythonic => at_start(self.pythonic_start(), vec![pythonic::OPEN]),
            ToolCallSyntax::Glm4 => at_start(self.glm_start(), vec![named_lines::SEPARATOR]),
            ToolCallSyntax::ToolCode => marked(vec![self.list(pythonic::TOOL_CODE.open)]),
            ToolCallSyntax::Olmo3 => marked(vec![self.list(pythonic::FUNCTION_CALLS.open)]),
            ToolCallSyntax::Granite20b => marked(vec![single(hermes::FUNCTION_CALL, false)]),
            _ => marked(self.marker_openings()),
        }
    }

    /// Returns the opening markers of a syntax in which a marker precedes every call.
    fn marker_openings(&self) -> Vec<CallOpening> {
        if let Some(tags) = self.syntax.tags() {
            return match tags.wrapper {
                None => vec![single(tags.call.open, false)],
                Some(wrapper) if tags.wraps_each_call => {
                    vec![single(wrapper.open, false), single(tags.call.open, true)]
                }
                Some(wrapper) => vec![self.list(wrapper.open), single(tags.call.open, true)],
            };
        }
        if let Some(section) = self.syntax.section() {
            return vec![self.list(section.section_open), single(section.call_open, true)];
        }
        let delimited = self.syntax.delimited();
        vec![single(delimited.map_or(hermes::OPEN, |delimited| delimited.open), false)]
    }

    /// Returns the opening for `marker`, followed by a list of calls with the delimiters of the syntax.
    fn list(&self, marker: &'static str) -> CallOpening {
        let delimiters = delimiters(self.syntax, &self.writer);
        CallOpening { marker, delimiters, is_list: true, is_bare: false }
    }

    /// Returns one opening per marker in `markers`; each marker is followed by a JSON array of calls.
    fn array_openings(&self, markers: &[&'static str]) -> Vec<CallOpening> {
        let opening = |&marker: &&'static str| CallOpening {
            marker,
            delimiters: CallDelimiters {
                open: format!("{marker}["),
                between: ", ".to_owned(),
                close: match (self.syntax, marker) {
                    (ToolCallSyntax::Phi4Mini, "<|tool_call|>") => "]<|/tool_call|>".to_owned(),
                    _ => "]".to_owned(),
                },
            },
            is_list: true,
            is_bare: false,
        };
        markers.iter().map(opening).collect()
    }
}

/// Returns the opening for `marker`, followed by a single call.
fn single(marker: &'static str, is_bare: bool) -> CallOpening {
    let delimiters =
        CallDelimiters { open: String::new(), between: String::new(), close: String::new() };
    CallOpening { marker, delimiters, is_list: false, is_bare }
}
