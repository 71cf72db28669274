//! Kinds of tool call syntaxes: each has a parser and a grammar, which are parameterised with the markers of a model
//! family.

use super::ToolCallParserOptions;
use super::call_emitter::ToolCallEmitter;
use super::call_grammar::{
    CallDelimiters, CallGrammarError, CallGrammarWriter, CallWrapperText, arguments_rule,
    object_schema,
};
use super::free_grammar::ToolCallStarts;
use super::tool_definition::ToolDefinition;
use crate::output_pieces::OutputPieceWriter;
use serde_json::json;
use std::fmt;

/// Parser of the tool calls of one output.
pub(crate) trait CallParser: fmt::Debug + Send + Sync {
    /// Parses the next character of the output after its reasoning.
    fn push(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>);

    /// Ends the output: emits the text held back.
    fn finish(&mut self, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>);

    /// Returns a copy of the parser in its current state.
    fn boxed_clone(&self) -> Box<dyn CallParser>;
}

/// Kind of tool call syntax, with the markers of one model family.
pub(crate) trait SyntaxKind: fmt::Debug + Sync {
    /// Creates the parser of a new output; `None` = the parser of the reasoning also parses the calls.
    fn parser(&'static self, options: ToolCallParserOptions<'_>) -> Option<Box<dyn CallParser>>;

    /// Returns the markers that may be special tokens of a tokenizer.
    fn special_markers(&self) -> Vec<&'static str>;

    /// Returns the marker that begins every call; `None` if the syntax has none.
    fn opening_marker(&self) -> Option<&'static str> {
        None
    }

    /// Whether calls are messages of the harmony format.
    fn is_harmony(&self) -> bool {
        false
    }

    /// Whether arguments are written as a JSON object.
    fn has_json_arguments(&self) -> bool {
        true
    }

    /// Whether a grammar can allow several calls.
    fn allows_several(&self) -> bool {
        true
    }

    /// Returns the text before, between and after the calls of an output.
    fn delimiters(&self, _writer: &CallGrammarWriter<'_>) -> CallDelimiters {
        CallDelimiters::default()
    }

    /// Returns the text around the arguments in a call of the function `name`.
    fn call_text(&self, name: &str, writer: &CallGrammarWriter<'_>) -> CallWrapperText;

    /// Returns the text around the arguments in a call without the tags that normally enclose each call.
    fn bare_call_text(&self, name: &str, writer: &CallGrammarWriter<'_>) -> CallWrapperText {
        self.call_text(name, writer)
    }

    /// Adds the rule for the arguments of `tool`.
    ///
    /// Errors: the syntax cannot represent the arguments of the tool as its schema requires.
    fn add_arguments(
        &'static self,
        index: usize,
        tool: &ToolDefinition,
        writer: &mut CallGrammarWriter<'_>,
    ) -> Result<(), CallGrammarError> {
        writer.json_rule(&arguments_rule(index), &object_schema(tool)?);
        Ok(())
    }

    /// Adds the rule `ANY_ARGUMENTS`, which accepts any arguments.
    fn add_any_arguments(&'static self, writer: &mut CallGrammarWriter<'_>) {
        writer.json_rule(ANY_ARGUMENTS, &json!({"type": "object"}));
    }

    /// Returns the positions in free text at which calls of `tools` can begin; `None` = calls and free text are separate
    /// messages.
    fn starts(
        &self,
        tools: &[&ToolDefinition],
        writer: &CallGrammarWriter<'_>,
    ) -> Option<ToolCallStarts>;
}

/// Rule of the arguments of tools whose schemas are not enforced.
pub(super) const ANY_ARGUMENTS: &str = "any_args";
