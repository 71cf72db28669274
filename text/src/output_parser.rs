//! Splits a model's output into reasoning, content and tool calls while it is generated.
//!
//! The result does not depend on how the output is cut; time is linear; the text held back is bounded.

use super::detokenizer::Detokenizer;
use super::output_pieces::{OutputPieces, PieceSink};
use super::reasoning::{
    OutputSection, ReasoningFamily, ReasoningReader, ReasoningSplitter, ReasoningStart,
};
use super::tokenizer::Tokenizer;
use super::tool_calls::{ToolCallParser, ToolCallSyntax, ToolDefinition};
use protocol::Token;
use std::sync::Arc;

/// Output parsers of a model.
#[derive(Debug, Clone, Default)]
pub struct OutputParsers {
    /// Tool call syntax; `None` = calls are not parsed.
    pub tool_call_syntax: Option<ToolCallSyntax>,
    /// Reasoning format; `None` = reasoning is not parsed.
    pub reasoning: Option<ReasoningFamily>,
    /// Whether the model writes the opening marker of the reasoning itself, unless the prompt closes the
    /// reasoning.
    pub opens_reasoning: bool,
    reasoning_markers: Arc<[Token]>,
    reasoning_and_call_markers: Arc<[Token]>,
}

impl OutputParsers {
    /// Creates the parsers for a tokenizer.
    pub fn new(
        calls: Option<ToolCallSyntax>,
        reasoning: Option<ReasoningFamily>,
        tokenizer: &Tokenizer,
    ) -> Self {
        let reasoning_markers = reasoning.map_or(&[][..], |_| ReasoningFamily::MARKERS);
        let call_markers = calls.map_or(&[][..], ToolCallSyntax::special_markers);
        let id = |marker: &&str| tokenizer.token_id(marker);
        Self {
            tool_call_syntax: calls,
            reasoning,
            opens_reasoning: false,
            reasoning_markers: reasoning_markers.iter().filter_map(id).collect(),
            reasoning_and_call_markers: reasoning_markers
                .iter()
                .chain(call_markers)
                .filter_map(id)
                .collect(),
        }
    }

    /// Returns the special tokens that the parser must see as text, with or without tool calls.
    pub fn visible_special(&self, calls: bool) -> Arc<[Token]> {
        Arc::clone(if calls { &self.reasoning_and_call_markers } else { &self.reasoning_markers })
    }
}

/// Tool calls that a parser looks for.
#[derive(Debug, Clone, Copy)]
pub struct ToolCallRules<'a> {
    /// Syntax of the calls.
    pub syntax: ToolCallSyntax,
    /// Tools that may be called.
    pub tools: &'a Arc<[ToolDefinition]>,
    /// Maximum number of calls; later ones are dropped.
    pub max_calls: u32,
}

/// Parser of one output.
#[derive(Debug, Clone)]
pub struct OutputParser {
    splitter: Option<ReasoningSplitter>,
    calls: Option<ToolCallParser>,
    /// Number of bytes read.
    bytes_read: usize,
}

impl OutputParser {
    /// Creates a parser before the first character. If both arguments are `None`, all text is content.
    pub fn new(reasoning: Option<ReasoningStart>, calls: Option<ToolCallRules<'_>>) -> Self {
        let opening_marker = calls.and_then(|rules| rules.syntax.opening_marker());
        Self {
            splitter: reasoning.map(|start| ReasoningSplitter::new(start, opening_marker)),
            calls: calls
                .map(|rules| ToolCallParser::new(rules.syntax, rules.tools, rules.max_calls)),
            bytes_read: 0,
        }
    }

    /// Parses the next part of the output and appends the pieces that are final.
    pub fn push(&mut self, text: &str, pieces: &mut OutputPieces) {
        if self.splitter.is_none() && self.calls.is_none() {
            return PieceSink::new(pieces, self.bytes_read).text(text);
        }
        for c in text.chars() {
            self.bytes_read += c.len_utf8();
            let mut out = PieceSink::new(pieces, self.bytes_read);
            match &mut self.splitter {
                Some(splitter) if !splitter.is_after() => {
                    splitter.push(c, &mut |section, c| {
                        emit_section(&mut self.calls, section, c, &mut out);
                    });
                }
                _ => emit_content(&mut self.calls, c, &mut out),
            }
        }
    }

    /// Ends the output: appends the text held back.
    pub fn finish(&mut self, pieces: &mut OutputPieces) {
        let mut out = PieceSink::new(pieces, self.bytes_read);
        if let Some(splitter) = &mut self.splitter {
            splitter.finish(&mut |section, c| emit_section(&mut self.calls, section, c, &mut out));
        }
        if let Some(calls) = &mut self.calls {
            calls.finish(&mut out);
        }
    }

    /// Whether the output is inside reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.splitter.as_ref().is_some_and(ReasoningSplitter::is_inside)
    }

    /// Whether reasoning is parsed.
    pub fn parses_reasoning(&self) -> bool {
        self.splitter.is_some()
    }

    /// Returns a reader that tracks the reasoning by token; `None` = the reasoning has ended or is not
    /// parsed.
    pub fn reasoning_reader(&self, detokenizer: Detokenizer) -> Option<ReasoningReader> {
        let splitter = self.splitter.as_ref().filter(|splitter| !splitter.is_after())?;
        Some(ReasoningReader::new(detokenizer, splitter.clone()))
    }

    /// Number of complete tool calls.
    pub fn complete_calls(&self) -> u32 {
        self.calls.as_ref().map_or(0, ToolCallParser::complete)
    }
}

fn emit_section(
    calls: &mut Option<ToolCallParser>,
    section: OutputSection,
    c: char,
    out: &mut PieceSink<'_>,
) {
    match section {
        OutputSection::Reasoning => out.reasoning(c),
        OutputSection::Content => emit_content(calls, c, out),
    }
}

fn emit_content(calls: &mut Option<ToolCallParser>, c: char, out: &mut PieceSink<'_>) {
    match calls {
        Some(calls) => calls.push(c, out),
        None => out.content(c),
    }
}
