//! Tool call syntax of a model family. The crate's module `families` defines the syntaxes.

use super::call_grammar::{self, CallGrammarError, CallGrammarWriter};
use super::syntax_kind::SyntaxKind;
use super::{ToolDefinition, free_grammar, harmony_grammar};
use crate::tokenizer::Tokenizer;
use std::fmt;

/// Tool call syntax of a model family (`--tool-call-parser`).
#[derive(Clone, Copy)]
pub struct ToolCallSyntax {
    /// Command-line name, different for each syntax.
    name: &'static str,
    /// Format of tool call ids that the templates of the family accept.
    id_format: ToolCallIdFormat,
    kind: &'static dyn SyntaxKind,
}

/// Format of tool call ids in replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolCallIdFormat {
    /// `call_` and 24 alphanumeric characters.
    Long,
    /// 9 alphanumeric characters, which Mistral's templates require.
    Nine,
    /// `functions.NAME:INDEX`, the format of Kimi K2; INDEX is the index of the call in the conversation.
    Function,
}

impl PartialEq for ToolCallSyntax {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for ToolCallSyntax {}

impl fmt::Debug for ToolCallSyntax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl ToolCallSyntax {
    /// Defines a syntax.
    pub(crate) const fn new(name: &'static str, kind: &'static dyn SyntaxKind) -> Self {
        Self { name, id_format: ToolCallIdFormat::Long, kind }
    }

    /// Sets the format of tool call ids.
    pub(crate) const fn with_ids(self, id_format: ToolCallIdFormat) -> Self {
        Self { id_format, ..self }
    }

    /// Returns the command-line name of the syntax.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Returns the format of tool call ids that this family's templates accept.
    pub fn id_format(self) -> ToolCallIdFormat {
        self.id_format
    }

    /// Whether calls are messages of the harmony format, which `ReasoningFamily::HARMONY` parses together with the
    /// reasoning.
    pub fn is_harmony(self) -> bool {
        self.kind.is_harmony()
    }

    /// Whether arguments are written as a JSON object. Other syntaxes write each argument separately.
    pub fn has_json_arguments(self) -> bool {
        self.kind.has_json_arguments()
    }

    /// Returns the markers that may be special tokens of a tokenizer; the detokenizer must keep their text,
    /// because the tool call parser needs it.
    pub fn special_markers(self) -> Vec<&'static str> {
        self.kind.special_markers()
    }

    /// Builds a grammar in llguidance's dialect of Lark: one call of any of `tools`, or, with `multiple`, one
    /// or more calls.
    ///
    /// Errors: this syntax cannot represent the arguments of a tool as its schema requires.
    pub fn grammar<'a>(
        self,
        tools: impl IntoIterator<Item = &'a ToolDefinition>,
        multiple: bool,
        tokenizer: &Tokenizer,
    ) -> Result<String, CallGrammarError> {
        let special = |marker: &str| special_token(marker, tokenizer);
        call_grammar::lark_grammar(self, tools, multiple, &special)
    }

    /// Builds a grammar of free text and calls: the model may choose whether to call tools, and the arguments
    /// of strict tools must match their schemas. Without `multiple`, the grammar allows at most one call.
    ///
    /// Errors: this syntax cannot represent the arguments of a strict tool as its schema requires.
    pub fn free_grammar<'a>(
        self,
        tools: impl IntoIterator<Item = &'a ToolDefinition>,
        multiple: bool,
        tokenizer: &Tokenizer,
    ) -> Result<String, CallGrammarError> {
        let special = |marker: &str| special_token(marker, tokenizer);
        free_grammar::free_grammar(self, tools, multiple, &special)
    }

    /// Returns the Lark expression of the text before an answer that a grammar enforces; empty if answers have
    /// no header.
    pub fn answer_header(self, tokenizer: &Tokenizer) -> String {
        if !self.is_harmony() {
            return String::new();
        }
        let special = |marker: &str| special_token(marker, tokenizer);
        harmony_grammar::answer_header(&CallGrammarWriter::new(self, &special))
    }

    /// Returns the marker that begins every call; `None` if the syntax has none.
    pub(crate) fn opening_marker(self) -> Option<&'static str> {
        self.kind.opening_marker()
    }

    pub(super) fn kind(self) -> &'static dyn SyntaxKind {
        self.kind
    }
}

/// Returns the Lark form of `marker` if it is a special token of the tokenizer; `None` if it is plain text.
pub(super) fn special_token(marker: &str, tokenizer: &Tokenizer) -> Option<String> {
    let id = tokenizer.token_id(marker).filter(|&id| tokenizer.is_special(id));
    id.map(|id| format!("<[{id}]>"))
}
