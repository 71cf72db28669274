//! Parses tool calls in a model's output. There is one parser per kind of syntax (`SyntaxKind`), which processes one
//! character at a time and is parameterised with the markers of each model family. The families are in `crate::families`.
//!
//! A parser reads each character once and holds back a bounded amount of text, so its time is linear and its
//! result does not depend on how the output is split into chunks. No text is lost: the content and the source
//! texts of all complete calls together are the whole output; a malformed call becomes content.

mod call_emitter;
mod call_grammar;
mod call_list;
mod call_object;
mod call_parameters;
mod closed_arguments;
mod delimited_calls;
mod delimited_constants;
mod delimited_grammar;
mod delimited_object;
mod free_grammar;
mod harmony_grammar;
mod json_escape;
mod json_lists;
mod json_objects;
mod json_scanner;
mod json_sections;
mod llama3_json;
mod marked_text;
mod marker_scanner;
mod mistral;
mod named_lines;
mod partial_arguments;
mod python_grammar;
mod python_text;
mod python_value;
mod pythonic;
mod pythonic_syntax;
mod schema_refs;
mod schema_types;
mod syntax_kind;
mod tag_grammar;
mod tag_syntax;
mod tagged_calls;
mod text_language;
mod tool_call_syntax;
mod tool_definition;
mod unparsed_syntax;
mod value_text;

use super::output_pieces::OutputPieceWriter;
pub(super) use call_emitter::ToolCallEmitter;
pub use call_grammar::CallGrammarError;
pub(super) use call_object::{CallArgumentsParser, CallParseStatus};
pub use closed_arguments::closed_arguments;
pub(super) use delimited_calls::DelimitedCallSyntax;
pub(super) use harmony_grammar::HarmonyCallSyntax;
pub use harmony_grammar::{HarmonyConstraintScope, harmony_preamble};
pub(super) use json_lists::{JsonListSyntax, ListMarkers};
pub(super) use json_objects::JsonObjectSyntax;
pub(super) use json_sections::{CallHeaderFormat, JsonSectionSyntax};
pub(super) use llama3_json::Llama3JsonSyntax;
pub(super) use marker_scanner::MarkerScanner;
pub(super) use mistral::MistralSyntax;
pub(super) use named_lines::NamedLineSyntax;
pub use partial_arguments::partial_arguments;
pub(super) use pythonic_syntax::{CallBlockSyntax, PythonicSyntax};
use std::sync::Arc;
use syntax_kind::CallParser;
pub(super) use tag_syntax::{TagPair, TagSyntax, ValueConversion, ValueOpening};
pub use tool_call_syntax::{ToolCallIdFormat, ToolCallSyntax};
pub use tool_definition::ToolDefinition;

/// Options of the tool call parser of one output.
#[derive(Debug, Clone, Copy)]
pub struct ToolCallParserOptions<'a> {
    /// Syntax of the tool calls.
    pub syntax: ToolCallSyntax,
    /// Tools that the model may call.
    pub tools: &'a Arc<[ToolDefinition]>,
    /// Maximum number of tool calls; further calls are dropped.
    pub max_calls: u32,
    /// Calls whose JSON a grammar enforces. In such JSON, no text is interpreted as a marker.
    pub enforcement: CallEnforcement,
}

/// Which tool calls have arguments that a grammar enforces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallEnforcement {
    /// No calls.
    None,
    /// Calls of strict tools.
    StrictTools,
    /// All calls.
    AllTools,
}

impl CallEnforcement {
    /// Whether the arguments of a call of `tool` are enforced.
    fn applies_to(self, tool: &ToolDefinition) -> bool {
        match self {
            Self::None => false,
            Self::StrictTools => tool.is_strict,
            Self::AllTools => true,
        }
    }
}

/// Parser of the tool calls of one output, for the syntax of any family.
#[derive(Debug)]
pub(super) struct ToolCallParser {
    calls: Box<dyn CallParser>,
    emitter: ToolCallEmitter,
}

impl Clone for ToolCallParser {
    fn clone(&self) -> Self {
        Self { calls: self.calls.boxed_clone(), emitter: self.emitter.clone() }
    }
}

impl ToolCallParser {
    /// Creates a parser of a new output; `None` in the harmony format, whose parser also parses the calls. Calls beyond
    /// `max_calls` are dropped.
    pub(super) fn new(options: ToolCallParserOptions<'_>) -> Option<Self> {
        let calls = options.syntax.kind().parser(options)?;
        Some(Self { calls, emitter: ToolCallEmitter::new(options.max_calls) })
    }

    /// Returns the number of calls that were emitted and are complete.
    pub(super) fn complete(&self) -> u32 {
        self.emitter.complete()
    }

    /// Parses the next character of the output after its reasoning.
    #[inline]
    pub(super) fn push(&mut self, c: char, out: &mut OutputPieceWriter<'_>) {
        self.calls.push(c, &mut self.emitter, out);
    }

    /// Ends the output: emits the text held back.
    pub(super) fn finish(&mut self, out: &mut OutputPieceWriter<'_>) {
        self.calls.finish(&mut self.emitter, out);
        self.emitter.finish(out);
    }
}
