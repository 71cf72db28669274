//! Splits a model's output into reasoning, content and tool calls while it is generated.
//!
//! The result does not depend on how the output is split into chunks. Parsing takes linear time, and the
//! amount of text held back is bounded.

use super::detokenizer::Detokenizer;
use super::harmony::HarmonyParser;
use super::output_pieces::{OutputPieceWriter, OutputPieces};
use super::reasoning::{
    OutputSection, ReasoningFamily, ReasoningParserOptions, ReasoningSplitter, ReasoningStart,
    TokenReasoningTracker, TrackedSections,
};
use super::tokenizer::Tokenizer;
use super::tool_calls::{ToolCallParser, ToolCallParserOptions, ToolCallSyntax};
use grammar::{ReasoningState, ReasoningTracker as _};
use protocol::Token;
use std::sync::Arc;

/// Reasoning and tool call parsers configured for a model (`--reasoning-parser`, `--tool-call-parser`).
#[derive(Debug, Clone, Default)]
pub struct OutputParserConfig {
    /// Syntax of the model's tool calls; `None` = tool calls are not parsed.
    pub tool_call_syntax: Option<ToolCallSyntax>,
    /// Reasoning format of the model; `None` = reasoning is not parsed.
    pub reasoning: Option<ReasoningFamily>,
    /// Whether the model begins its output with the opening reasoning marker, unless the prompt ends with a
    /// reasoning marker.
    pub opens_reasoning: bool,
    reasoning_markers: Arc<[Token]>,
    reasoning_and_call_markers: Arc<[Token]>,
}

impl OutputParserConfig {
    /// Creates the output parsers of a model with this tokenizer. The harmony format needs both parsers:
    /// either both arguments are of this format, or none.
    pub fn new(
        calls: Option<ToolCallSyntax>,
        reasoning: Option<ReasoningFamily>,
        tokenizer: &Tokenizer,
    ) -> Self {
        let reasoning_markers = reasoning.map(ReasoningFamily::special_tokens).unwrap_or_default();
        let call_markers = calls.map(ToolCallSyntax::special_markers).unwrap_or_default();
        let id = |marker: &&str| tokenizer.token_id(marker);
        Self {
            tool_call_syntax: calls,
            reasoning,
            opens_reasoning: false,
            reasoning_markers: reasoning_markers.iter().filter_map(id).collect(),
            reasoning_and_call_markers: reasoning_markers
                .iter()
                .chain(&call_markers)
                .filter_map(id)
                .collect(),
        }
    }

    /// Returns the special tokens that the detokenizer must keep in the text because a parser needs them:
    /// reasoning markers, and with `calls` the markers of tool calls too.
    pub fn visible_special(&self, calls: bool) -> Arc<[Token]> {
        Arc::clone(if calls { &self.reasoning_and_call_markers } else { &self.reasoning_markers })
    }
}

/// Splits the output generated for one choice into reasoning, content and tool calls.
#[derive(Debug, Clone)]
pub struct OutputParser {
    sections: OutputSections,
    /// Length in bytes of the output parsed so far.
    bytes_read: usize,
}

/// Parsers of the sections of one output.
#[derive(Debug, Clone)]
enum OutputSections {
    /// Reasoning up to a marker, then content and tool calls.
    Separate(SeparateSections),
    /// Messages, each of which is reasoning, content or a tool call.
    Harmony(HarmonyParser),
}

/// Parser of an output that begins with its reasoning.
#[derive(Debug, Clone)]
struct SeparateSections {
    splitter: Option<ReasoningSplitter>,
    calls: Option<ToolCallParser>,
}

impl OutputParser {
    /// Creates a parser of a new output. If both arguments are `None`, all text is content. If one of them is
    /// of the harmony format, the whole output is parsed as harmony.
    pub fn new(
        reasoning: Option<ReasoningParserOptions>,
        calls: Option<ToolCallParserOptions<'_>>,
    ) -> Self {
        let harmony_calls = calls.filter(|rules| rules.syntax.is_harmony());
        let is_harmony = |options: ReasoningParserOptions| options.family.is_harmony();
        let sections = if harmony_calls.is_some() || reasoning.is_some_and(is_harmony) {
            let start = reasoning.map_or(ReasoningStart::AtMarker, |options| options.start);
            OutputSections::Harmony(HarmonyParser::new(start, harmony_calls))
        } else {
            OutputSections::Separate(SeparateSections::new(reasoning, calls))
        };
        Self { sections, bytes_read: 0 }
    }

    /// Parses the next chunk of the output and appends to `pieces` all pieces that can no longer change.
    pub fn push(&mut self, text: &str, pieces: &mut OutputPieces) {
        if let OutputSections::Separate(SeparateSections { splitter: None, calls: None }) =
            self.sections
        {
            return OutputPieceWriter::new(pieces, self.bytes_read).text(text);
        }
        for c in text.chars() {
            self.bytes_read += c.len_utf8();
            let mut out = OutputPieceWriter::new(pieces, self.bytes_read);
            match &mut self.sections {
                OutputSections::Separate(sections) => sections.push(c, &mut out),
                OutputSections::Harmony(parser) => parser.push(c, &mut out),
            }
        }
    }

    /// Ends the output: appends the text held back to `pieces`.
    pub fn finish(&mut self, pieces: &mut OutputPieces) {
        let mut out = OutputPieceWriter::new(pieces, self.bytes_read);
        match &mut self.sections {
            OutputSections::Separate(sections) => sections.finish(&mut out),
            OutputSections::Harmony(parser) => parser.finish(&mut out),
        }
    }

    /// Whether the output parsed so far ends inside the reasoning.
    pub fn is_reasoning(&self) -> bool {
        match &self.sections {
            OutputSections::Separate(SeparateSections { splitter, .. }) => {
                splitter.as_ref().is_some_and(ReasoningSplitter::is_inside)
            }
            OutputSections::Harmony(parser) => parser.is_reasoning(),
        }
    }

    /// Whether reasoning is parsed.
    pub fn parses_reasoning(&self) -> bool {
        match &self.sections {
            OutputSections::Separate(sections) => sections.splitter.is_some(),
            OutputSections::Harmony(_) => true,
        }
    }

    /// Returns a tracker that determines, token by token, where the reasoning ends; `None` if the reasoning
    /// has ended or is not parsed.
    pub fn reasoning_reader(&self, detokenizer: Detokenizer) -> Option<TokenReasoningTracker> {
        let sections = match &self.sections {
            OutputSections::Separate(SeparateSections { splitter, .. }) => {
                TrackedSections::Separate(splitter.clone()?)
            }
            OutputSections::Harmony(parser) => TrackedSections::Harmony(parser.clone()),
        };
        let tracker = TokenReasoningTracker::new(detokenizer, sections);
        Some(tracker).filter(|tracker| tracker.state() != ReasoningState::After)
    }

    /// Returns the number of complete tool calls.
    pub fn complete_calls(&self) -> u32 {
        match &self.sections {
            OutputSections::Separate(SeparateSections { calls, .. }) => {
                calls.as_ref().map_or(0, ToolCallParser::complete)
            }
            OutputSections::Harmony(parser) => parser.complete_calls(),
        }
    }
}

impl SeparateSections {
    fn new(
        reasoning: Option<ReasoningParserOptions>,
        calls: Option<ToolCallParserOptions<'_>>,
    ) -> Self {
        let opening_marker = calls.and_then(|rules| rules.syntax.opening_marker());
        Self {
            splitter: reasoning.map(|options| ReasoningSplitter::new(options, opening_marker)),
            calls: calls.and_then(ToolCallParser::new),
        }
    }

    fn push(&mut self, c: char, out: &mut OutputPieceWriter<'_>) {
        match &mut self.splitter {
            Some(splitter) if !splitter.is_after() => {
                splitter.push(c, &mut |section, c| emit_section(&mut self.calls, section, c, out));
            }
            _ => emit_content(&mut self.calls, c, out),
        }
    }

    fn finish(&mut self, out: &mut OutputPieceWriter<'_>) {
        if let Some(splitter) = &mut self.splitter {
            splitter.finish(&mut |section, c| emit_section(&mut self.calls, section, c, out));
        }
        if let Some(calls) = &mut self.calls {
            calls.finish(out);
        }
    }
}

fn emit_section(
    calls: &mut Option<ToolCallParser>,
    section: OutputSection,
    c: char,
    out: &mut OutputPieceWriter<'_>,
) {
    match section {
        OutputSection::Reasoning => out.reasoning(c),
        OutputSection::Content => emit_content(calls, c, out),
    }
}

fn emit_content(calls: &mut Option<ToolCallParser>, c: char, out: &mut OutputPieceWriter<'_>) {
    match calls {
        Some(calls) => calls.push(c, out),
        None => out.content(c),
    }
}
