//! Parses tool calls in a model's output. There is one parser per kind of syntax, which processes one
//! character at a time and is parameterised with the markers of each model family.
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
mod hermes;
mod json_escape;
mod json_lists;
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
mod schema_refs;
mod schema_types;
mod syntax_names;
mod tag_grammar;
mod tag_syntax;
mod tagged_calls;
mod text_language;
mod tool_definition;
mod unparsed_syntax;
mod value_text;

use super::output_pieces::OutputPieceWriter;
pub(super) use call_emitter::ToolCallEmitter;
pub use call_grammar::CallGrammarError;
pub(super) use call_object::{CallArgumentsParser, CallParseStatus};
pub use closed_arguments::closed_arguments;
use delimited_calls::GemmaToolParser;
pub use harmony_grammar::{HarmonyConstraintScope, harmony_preamble};
use hermes::HermesToolParser;
use json_lists::{GRANITE, JsonListToolParser, PHI4_MINI, XLAM};
use json_sections::DeepSeekKimiToolParser;
use llama3_json::LlamaToolParser;
pub(super) use marker_scanner::MarkerScanner;
use mistral::MistralToolParser;
use named_lines::GlmToolParser;
pub use partial_arguments::partial_arguments;
use pythonic::PythonicToolParser;
use std::sync::Arc;
pub use syntax_names::{ToolCallIdFormat, ToolCallSyntax};
use tagged_calls::TaggedToolParser;
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

/// Tool call parser of one syntax: one variant per parser.
#[derive(Debug, Clone)]
enum FamilyToolParser {
    Hermes(HermesToolParser),
    Delimited(GemmaToolParser),
    Tagged(Box<TaggedToolParser>),
    Llama(LlamaToolParser),
    Glm(GlmToolParser),
    List(JsonListToolParser),
    Mistral(MistralToolParser),
    Pythonic(PythonicToolParser),
    Section(DeepSeekKimiToolParser),
}

impl FamilyToolParser {
    fn new(options: ToolCallParserOptions<'_>) -> Self {
        let ToolCallParserOptions { syntax, tools, enforcement, .. } = options;
        if let Some(tags) = syntax.tags() {
            return Self::Tagged(Box::new(TaggedToolParser::new(
                tags,
                Arc::clone(tools),
                enforcement,
            )));
        }
        if let Some(section) = syntax.section() {
            return Self::Section(DeepSeekKimiToolParser::new(section));
        }
        if let Some(delimited) = syntax.delimited() {
            return Self::Delimited(GemmaToolParser::new(delimited));
        }
        let names = || Some(tools.iter().map(|tool| tool.name.clone()).collect());
        match syntax {
            ToolCallSyntax::Llama3Json => Self::Llama(LlamaToolParser::new(names())),
            ToolCallSyntax::Glm4 => {
                Self::Glm(GlmToolParser::new(tools.iter().map(|tool| tool.name.clone()).collect()))
            }
            ToolCallSyntax::Mistral => Self::Mistral(MistralToolParser::default()),
            ToolCallSyntax::Pythonic | ToolCallSyntax::ToolCode | ToolCallSyntax::Olmo3 => {
                Self::Pythonic(PythonicToolParser::new(names(), syntax.call_block()))
            }
            ToolCallSyntax::Granite20b => Self::Hermes(HermesToolParser::new(&hermes::GRANITE_20B)),
            ToolCallSyntax::Granite => Self::List(JsonListToolParser::new(&GRANITE, names())),
            ToolCallSyntax::Phi4Mini => Self::List(JsonListToolParser::new(&PHI4_MINI, names())),
            ToolCallSyntax::Xlam => Self::List(JsonListToolParser::new(&XLAM, names())),
            _ => Self::Hermes(HermesToolParser::new(&hermes::HERMES)),
        }
    }
}

/// Parser of the tool calls of one output, for the syntax of any family.
#[derive(Debug, Clone)]
pub(super) struct ToolCallParser {
    family_parser: FamilyToolParser,
    emitter: ToolCallEmitter,
}

impl ToolCallParser {
    /// Creates a parser of a new output. Calls beyond `max_calls` are dropped.
    pub(super) fn new(options: ToolCallParserOptions<'_>) -> Self {
        let family_parser = FamilyToolParser::new(options);
        Self { family_parser, emitter: ToolCallEmitter::new(options.max_calls) }
    }

    /// Returns the number of calls that were emitted and are complete.
    pub(super) fn complete(&self) -> u32 {
        self.emitter.complete()
    }

    /// Parses the next character of the output after its reasoning.
    #[inline]
    pub(super) fn push(&mut self, c: char, out: &mut OutputPieceWriter<'_>) {
        let emitter = &mut self.emitter;
        match &mut self.family_parser {
            FamilyToolParser::Hermes(parser) => parser.push(c, emitter, out),
            FamilyToolParser::Delimited(parser) => parser.push(c, emitter, out),
            FamilyToolParser::Tagged(parser) => parser.push(c, emitter, out),
            FamilyToolParser::Llama(parser) => parser.push(c, emitter, out),
            FamilyToolParser::Glm(parser) => parser.push(c, emitter, out),
            FamilyToolParser::List(parser) => parser.push(c, emitter, out),
            FamilyToolParser::Mistral(parser) => parser.push(c, emitter, out),
            FamilyToolParser::Pythonic(parser) => parser.push(c, emitter, out),
            FamilyToolParser::Section(parser) => parser.push(c, emitter, out),
        }
    }

    /// Ends the output: emits the text held back.
    pub(super) fn finish(&mut self, out: &mut OutputPieceWriter<'_>) {
        let emitter = &mut self.emitter;
        match &mut self.family_parser {
            FamilyToolParser::Hermes(parser) => parser.finish(emitter, out),
            FamilyToolParser::Delimited(parser) => parser.finish(emitter, out),
            FamilyToolParser::Tagged(parser) => parser.finish(emitter, out),
            FamilyToolParser::Llama(parser) => parser.finish(emitter, out),
            FamilyToolParser::Glm(parser) => parser.finish(emitter, out),
            FamilyToolParser::List(parser) => parser.finish(emitter, out),
            FamilyToolParser::Mistral(parser) => parser.finish(emitter, out),
            FamilyToolParser::Pythonic(parser) => parser.finish(emitter, out),
            FamilyToolParser::Section(parser) => parser.finish(emitter, out),
        }
        emitter.finish(out);
    }
}
