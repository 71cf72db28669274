//! Tool calls in Python's syntax: the markers of a model family, and where its calls may begin.

use super::ToolCallParserOptions;
use super::call_grammar::{
    CallDelimiters, CallGrammarError, CallGrammarWriter, CallWrapperText, arguments_rule,
};
use super::call_object::allowed_names;
use super::free_grammar::{CallOpening, ToolCallStarts, name_pattern};
use super::python_grammar;
use super::pythonic::PythonicToolParser;
use super::syntax_kind::{ANY_ARGUMENTS, CallParser, SyntaxKind};
use super::tool_definition::ToolDefinition;

/// Optional marker before a list of calls.
pub(super) const OPEN: &str = "<|python_start|>";
/// Optional marker after a list of calls.
pub(super) const CLOSE: &str = "<|python_end|>";

/// Layout of Python calls in an output.
#[derive(Debug)]
pub(crate) enum PythonicSyntax {
    /// A list `[name(key="value"), …]` at the beginning of the output.
    List,
    /// Calls that are written one per line between two markers.
    Block(CallBlockSyntax),
}

/// Markers around calls that are written one per line.
#[derive(Debug)]
pub(crate) struct CallBlockSyntax {
    pub open: &'static str,
    /// Marker after the last call; ASCII.
    pub close: &'static str,
    /// Whether the markers are a code fence: whitespace must follow `open`, and a call may be printed.
    pub is_fence: bool,
}

impl SyntaxKind for PythonicSyntax {
    fn parser(&'static self, options: ToolCallParserOptions<'_>) -> Option<Box<dyn CallParser>> {
        let block = match self {
            Self::List => None,
            Self::Block(block) => Some(block),
        };
        Some(Box::new(PythonicToolParser::new(Some(allowed_names(options.tools)), block)))
    }

    fn special_markers(&self) -> Vec<&'static str> {
        match self {
            Self::List => vec![OPEN, CLOSE],
            Self::Block(CallBlockSyntax { is_fence: true, .. }) => Vec::new(),
            Self::Block(block) => vec![block.open, block.close],
        }
    }

    fn opening_marker(&self) -> Option<&'static str> {
        match self {
            Self::List => None,
            Self::Block(block) => Some(block.open),
        }
    }

    fn has_json_arguments(&self) -> bool {
        false
    }

    fn delimiters(&self, _writer: &CallGrammarWriter<'_>) -> CallDelimiters {
        match self {
            Self::List => CallDelimiters::new("[", ", ", "]"),
            Self::Block(CallBlockSyntax { open, close, is_fence: true }) => {
                CallDelimiters::new(&format!("{open}\n"), "\n", &format!("\n{close}"))
            }
            Self::Block(CallBlockSyntax { open, close, .. }) => {
                CallDelimiters::new(open, "\n", close)
            }
        }
    }

    fn call_text(&self, name: &str, _writer: &CallGrammarWriter<'_>) -> CallWrapperText {
        CallWrapperText::new(&format!("{name}("), ")")
    }

    fn add_arguments(
        &'static self,
        index: usize,
        tool: &ToolDefinition,
        writer: &mut CallGrammarWriter<'_>,
    ) -> Result<(), CallGrammarError> {
        let arguments = python_grammar::python_arguments(index, tool, writer)?;
        writer.rule(&arguments_rule(index), &arguments);
        Ok(())
    }

    fn add_any_arguments(&'static self, writer: &mut CallGrammarWriter<'_>) {
        let arguments = python_grammar::any_arguments(writer);
        writer.rule(ANY_ARGUMENTS, &arguments);
    }

    fn starts(
        &self,
        tools: &[&ToolDefinition],
        writer: &CallGrammarWriter<'_>,
    ) -> Option<ToolCallStarts> {
        let delimiters = self.delimiters(writer);
        Some(match self {
            Self::List => {
                let start = format!("\\[\\s*(?:{})\\s*\\(", name_pattern(tools));
                ToolCallStarts::at_start(start, &[OPEN], delimiters)
            }
            Self::Block(block) => {
                ToolCallStarts::marked(vec![CallOpening::list(block.open, delimiters)])
            }
        })
    }
}
