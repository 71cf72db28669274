//! Tool calls that are written as tags around plain-text values: the tags of a model family, and where its calls may
//! begin.

use super::ToolCallParserOptions;
use super::call_grammar::{
    CallDelimiters, CallGrammarError, CallGrammarWriter, CallWrapperText, arguments_rule,
};
use super::free_grammar::{CallOpening, ToolCallStarts};
use super::syntax_kind::{ANY_ARGUMENTS, CallParser, SyntaxKind};
use super::tag_grammar;
use super::tagged_calls::TaggedToolParser;
use super::tool_definition::ToolDefinition;
use std::sync::Arc;

/// Opening and closing tag of an element.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TagPair {
    pub open: &'static str,
    pub close: &'static str,
}

/// Conversion of the text of a value to JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueConversion {
    /// Converted to the type of the parameter in the tool's schema.
    Typed,
    /// As a string.
    Text,
    /// Parsed as JSON; text that is not valid JSON becomes a string.
    Json,
}

/// Text between a key and its value, and the resulting form of the value.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ValueOpening {
    pub text: &'static str,
    pub form: ValueConversion,
}

/// Tags of one model family.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TagSyntax {
    /// Tags around all calls together; models may omit these tags.
    pub wrapper: Option<TagPair>,
    /// Text before the function name, and tag after the parameters.
    pub call: TagPair,
    /// Texts that end the function name: the end of its tag, or (if the name has no tag) a line break, the
    /// next parameter or the end of the call.
    pub name_ends: &'static [&'static str],
    pub parameter_open: &'static str,
    pub key_end: &'static str,
    /// Texts that may follow `key_end` and open the value; if empty, the value follows directly and has the
    /// form `Typed`.
    pub value_openings: &'static [ValueOpening],
    /// Texts that end a value: its closing tag, and for some families the tags that may follow it.
    pub value_ends: &'static [&'static str],
    /// Whether the line breaks after the opening tag and before the closing tag of a value are syntax, not
    /// part of the value.
    pub wraps_values: bool,
    /// Whether the tags in `wrapper` enclose each call separately, not all calls together.
    pub wraps_each_call: bool,
    /// Text that the model generates between the tags of a call.
    pub line_break: &'static str,
    /// Text between `key_end` and the text that opens the value.
    pub value_gap: &'static str,
    /// Texts that may be special tokens of a tokenizer.
    pub special: &'static [&'static str],
}

impl SyntaxKind for TagSyntax {
    fn parser(&'static self, options: ToolCallParserOptions<'_>) -> Option<Box<dyn CallParser>> {
        let tools = Arc::clone(options.tools);
        Some(Box::new(TaggedToolParser::new(self, tools, options.enforcement)))
    }

    fn special_markers(&self) -> Vec<&'static str> {
        self.special.to_vec()
    }

    fn opening_marker(&self) -> Option<&'static str> {
        Some(self.wrapper.map_or(self.call.open, |wrapper| wrapper.open))
    }

    fn has_json_arguments(&self) -> bool {
        false
    }

    fn delimiters(&self, _writer: &CallGrammarWriter<'_>) -> CallDelimiters {
        match self.wrapper.filter(|_| !self.wraps_each_call) {
            None => CallDelimiters::new("", self.line_break, ""),
            Some(wrapper) => {
                let (open, close) = (format!("{}\n", wrapper.open), format!("\n{}", wrapper.close));
                CallDelimiters::new(&open, "\n", &close)
            }
        }
    }

    fn call_text(&self, name: &str, _writer: &CallGrammarWriter<'_>) -> CallWrapperText {
        tag_grammar::call_tags(self, name)
    }

    fn bare_call_text(&self, name: &str, _writer: &CallGrammarWriter<'_>) -> CallWrapperText {
        tag_grammar::call_tags(&Self { wraps_each_call: false, ..*self }, name)
    }

    fn add_arguments(
        &'static self,
        index: usize,
        tool: &ToolDefinition,
        writer: &mut CallGrammarWriter<'_>,
    ) -> Result<(), CallGrammarError> {
        let parameters = tag_grammar::tagged_parameters(self, index, tool, writer)?;
        writer.rule(&arguments_rule(index), &parameters);
        Ok(())
    }

    fn add_any_arguments(&'static self, writer: &mut CallGrammarWriter<'_>) {
        let parameters = tag_grammar::any_parameters(self, writer);
        writer.rule(ANY_ARGUMENTS, &parameters);
    }

    fn starts(
        &self,
        _tools: &[&ToolDefinition],
        writer: &CallGrammarWriter<'_>,
    ) -> Option<ToolCallStarts> {
        Some(ToolCallStarts::marked(match self.wrapper {
            None => vec![CallOpening::single(self.call.open)],
            Some(wrapper) if self.wraps_each_call => {
                vec![CallOpening::single(wrapper.open), CallOpening::bare(self.call.open)]
            }
            Some(wrapper) => vec![
                CallOpening::list(wrapper.open, self.delimiters(writer)),
                CallOpening::bare(self.call.open),
            ],
        }))
    }
}
