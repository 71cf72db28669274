//! Parses tool calls in a model's output: one parser per model family, which processes one character at a
//! time.
//!
//! A parser reads each character once and holds back a bounded amount of text, so its time is linear and its
//! result does not depend on how the output is split. The parser names are those of vLLM. A malformed call
//! becomes content.

mod call_emitter;
mod call_grammar;
mod call_object;
mod closed_arguments;
mod deepseek;
mod hermes;
mod json_scanner;
mod llama3_json;
mod marker_scanner;
mod mistral;
mod partial_arguments;
mod qwen3_coder;
mod schema_types;
mod tool_definition;
mod unparsed_syntax;

use super::output_pieces::OutputPieceWriter;
use super::tokenizer::Tokenizer;
use call_emitter::ToolCallEmitter;
pub use closed_arguments::closed_arguments;
use deepseek::DeepSeekToolParser;
use hermes::HermesToolParser;
use llama3_json::LlamaToolParser;
pub(super) use marker_scanner::MarkerScanner;
use mistral::MistralToolParser;
pub use partial_arguments::partial_arguments;
use qwen3_coder::Qwen3CoderToolParser;
use std::sync::Arc;
pub use tool_definition::ToolDefinition;

/// Tool call syntax of a model family (`--tool-call-parser`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolCallSyntax {
    /// JSON between `<tool_call>` and `</tool_call>`: Hermes, Qwen2.5, Qwen3.
    Hermes,
    /// XML-like `<function=…>` and `<parameter=…>`: Qwen3-Coder.
    Qwen3Coder,
    /// JSON without markers: Llama 3.
    Llama3Json,
    /// JSON after `[TOOL_CALLS]`: Mistral.
    Mistral,
    /// JSON in a code fence, between special tokens: DeepSeek V3, R1.
    DeepSeekV3,
    /// JSON between special tokens: DeepSeek V3.1.
    DeepSeekV31,
}

/// Format of the tool call ids in replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolCallIdFormat {
    /// `call_` and 24 alphanumeric characters.
    Long,
    /// 9 alphanumeric characters, which Mistral's templates require.
    Nine,
}

impl ToolCallSyntax {
    /// Command-line names of the syntaxes.
    pub const NAMES: &[(&str, Self)] = &[
        ("hermes", Self::Hermes),
        ("qwen3_coder", Self::Qwen3Coder),
        ("qwen3_xml", Self::Qwen3Coder),
        ("llama3_json", Self::Llama3Json),
        ("mistral", Self::Mistral),
        ("deepseek_v3", Self::DeepSeekV3),
        ("deepseek_v31", Self::DeepSeekV31),
    ];

    /// Returns the format of tool call ids that this family's templates accept.
    pub fn id_format(self) -> ToolCallIdFormat {
        if self == Self::Mistral { ToolCallIdFormat::Nine } else { ToolCallIdFormat::Long }
    }

    /// Returns the markers that may be special tokens of a tokenizer; the detokenizer must keep their text
    /// for the parser.
    pub fn special_markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::Qwen3Coder => &[hermes::OPEN, hermes::CLOSE],
            Self::Llama3Json => &[llama3_json::TAG],
            Self::Mistral => &[mistral::CALLS, mistral::CALL_ID, mistral::ARGS],
            Self::DeepSeekV3 | Self::DeepSeekV31 => &[
                deepseek::CALLS_BEGIN,
                deepseek::CALLS_END,
                deepseek::CALL_BEGIN,
                deepseek::CALL_END,
                deepseek::SEPARATOR,
            ],
        }
    }

    /// Builds a grammar in llguidance's dialect of Lark: one call, or with `multiple` one or more calls, of
    /// any of `tools`.
    pub fn grammar<'a>(
        self,
        tools: impl IntoIterator<Item = &'a ToolDefinition>,
        multiple: bool,
        tokenizer: &Tokenizer,
    ) -> String {
        call_grammar::lark_grammar(self, tools, multiple, |marker| {
            match tokenizer.token_id(marker) {
                Some(id) if tokenizer.is_special(id) => format!("<[{id}]>"),
                _ => call_grammar::text(marker),
            }
        })
    }

    /// Returns the marker that begins every call; `None` if the syntax has none.
    pub(super) fn opening_marker(self) -> Option<&'static str> {
        match self {
            Self::Hermes | Self::Qwen3Coder => Some(hermes::OPEN),
            Self::Llama3Json => None,
            Self::Mistral => Some(mistral::CALLS),
            Self::DeepSeekV3 | Self::DeepSeekV31 => Some(deepseek::CALLS_BEGIN),
        }
    }
}

#[derive(Debug, Clone)]
enum FamilyToolParser {
    Hermes(HermesToolParser),
    Coder(Qwen3CoderToolParser),
    Llama(LlamaToolParser),
    Mistral(MistralToolParser),
    DeepSeek(DeepSeekToolParser),
}

/// Parser of the tool calls of one output, for the syntax of any family.
#[derive(Debug, Clone)]
pub(super) struct ToolCallParser {
    family_parser: FamilyToolParser,
    emitter: ToolCallEmitter,
}

impl ToolCallParser {
    /// Creates a parser of a new output. Calls beyond `calls_max` are dropped.
    pub(super) fn new(
        syntax: ToolCallSyntax,
        tools: &Arc<[ToolDefinition]>,
        calls_max: u32,
    ) -> Self {
        let family_parser = match syntax {
            ToolCallSyntax::Hermes => FamilyToolParser::Hermes(HermesToolParser::default()),
            ToolCallSyntax::Qwen3Coder => {
                FamilyToolParser::Coder(Qwen3CoderToolParser::new(Arc::clone(tools)))
            }
            ToolCallSyntax::Llama3Json => {
                let names = tools.iter().map(|tool| tool.name.clone());
                FamilyToolParser::Llama(LlamaToolParser::new(Some(names.collect())))
            }
            ToolCallSyntax::Mistral => FamilyToolParser::Mistral(MistralToolParser::default()),
            ToolCallSyntax::DeepSeekV3 => FamilyToolParser::DeepSeek(DeepSeekToolParser::new(true)),
            ToolCallSyntax::DeepSeekV31 => {
                FamilyToolParser::DeepSeek(DeepSeekToolParser::new(false))
            }
        };
        Self { family_parser, emitter: ToolCallEmitter::new(calls_max) }
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
            FamilyToolParser::Coder(parser) => parser.push(c, emitter, out),
            FamilyToolParser::Llama(parser) => parser.push(c, emitter, out),
            FamilyToolParser::Mistral(parser) => parser.push(c, emitter, out),
            FamilyToolParser::DeepSeek(parser) => parser.push(c, emitter, out),
        }
    }

    /// Ends the output: emits the text held back.
    pub(super) fn finish(&mut self, out: &mut OutputPieceWriter<'_>) {
        let emitter = &mut self.emitter;
        match &mut self.family_parser {
            FamilyToolParser::Hermes(parser) => parser.finish(emitter, out),
            FamilyToolParser::Coder(parser) => parser.finish(emitter, out),
            FamilyToolParser::Llama(parser) => parser.finish(emitter, out),
            FamilyToolParser::Mistral(parser) => parser.finish(emitter, out),
            FamilyToolParser::DeepSeek(parser) => parser.finish(emitter, out),
        }
        emitter.finish(out);
    }
}
