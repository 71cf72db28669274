//! Selects the reasoning parser and the tool-call parser of a model: by flag, else by its chat template or
//! architecture.

use crate::config::ReplyArgs;
use anyhow::{Result, bail};
use models::ModelArchitecture;
use text::{ChatTemplate, OutputParserConfig, ReasoningFamily, Tokenizer, ToolCallSyntax};

/// Selects the parsers of a model.
///
/// Errors: only one of the parsers is of the harmony format.
pub(super) fn select_parsers(
    args: &ReplyArgs,
    architecture: ModelArchitecture,
    template: Option<&ChatTemplate>,
    tokenizer: &Tokenizer,
) -> Result<OutputParserConfig> {
    let mentions = |text: &str| template.is_some_and(|template| template.mentions(text));
    let flags =
        ParserFlags { tool_calls: &args.tool_call_parser, reasoning: &args.reasoning_parser };
    let SelectedParsers { tool_calls, reasoning } = flags.selected(architecture, mentions)?;
    tracing::info!(
        tool_calls = syntax_name(tool_calls),
        reasoning = family_name(reasoning),
        "output parsers selected"
    );
    // A template with the variable `enable_thinking` belongs to a model that reasons unless the variable is
    // false.
    let mut parsers = OutputParserConfig::new(tool_calls, reasoning, tokenizer);
    parsers.opens_reasoning = mentions("enable_thinking");
    Ok(parsers)
}

/// Parsers of a model; `None` = the output is not parsed for this.
#[derive(Debug, PartialEq, Eq)]
struct SelectedParsers {
    tool_calls: Option<ToolCallSyntax>,
    reasoning: Option<ReasoningFamily>,
}

impl SelectedParsers {
    /// Checks that both parsers or none of them is of the harmony format.
    fn check_harmony(&self) -> Result<()> {
        let is_harmony = self.tool_calls.is_some_and(ToolCallSyntax::is_harmony);
        if is_harmony != self.reasoning.is_some_and(ReasoningFamily::is_harmony) {
            bail!(
                "--tool-call-parser {} and --reasoning-parser {}: in the harmony format, one parser reads \
             reasoning and tool calls; select harmony or none with both flags",
                syntax_name(self.tool_calls),
                family_name(self.reasoning)
            );
        }
        Ok(())
    }
}

/// Names given by the flags `--tool-call-parser` and `--reasoning-parser`.
struct ParserFlags<'a> {
    tool_calls: &'a str,
    reasoning: &'a str,
}

impl ParserFlags<'_> {
    /// Selects the parsers. With `auto`, a parser is selected by the chat template and the architecture; it is
    /// of the harmony format if the other flag selects this format.
    ///
    /// Errors: only one of the parsers is of the harmony format, in which reasoning and tool calls cannot be
    /// parsed separately.
    fn selected(
        &self,
        architecture: ModelArchitecture,
        mentions: impl Fn(&str) -> bool,
    ) -> Result<SelectedParsers> {
        // Unknown names have been rejected before.
        let named_calls = ToolCallSyntax::named(self.tool_calls);
        let named_reasoning = ReasoningFamily::named(self.reasoning);
        let tool_calls = match self.tool_calls {
            "auto" if named_reasoning.is_some_and(ReasoningFamily::is_harmony) => {
                Some(ToolCallSyntax::HARMONY)
            }
            "auto" => tool_call_syntax(architecture, &mentions),
            _ => named_calls,
        };
        let reasoning = match self.reasoning {
            "auto" if named_calls.is_some_and(ToolCallSyntax::is_harmony) => {
                Some(ReasoningFamily::HARMONY)
            }
            "auto" => reasoning_family(architecture, &mentions),
            _ => named_reasoning,
        };
        let selected = SelectedParsers { tool_calls, reasoning };
        selected.check_harmony()?;
        Ok(selected)
    }
}

/// Returns the command-line name of a tool-call parser; `none` without a parser.
fn syntax_name(syntax: Option<ToolCallSyntax>) -> &'static str {
    syntax.map_or("none", ToolCallSyntax::name)
}

/// Returns the command-line name of a reasoning parser; `none` without a parser.
fn family_name(family: Option<ReasoningFamily>) -> &'static str {
    family.map_or("none", ReasoningFamily::name)
}

/// Selects the syntax of tool calls. `None` = neither the chat template nor the models of the architecture have
/// tool calls.
fn tool_call_syntax(
    architecture: ModelArchitecture,
    mentions: impl Fn(&str) -> bool,
) -> Option<ToolCallSyntax> {
    // The chat template is checked before the architecture: a fine-tuned model has the architecture of its
    // base model, but often another chat template.
    let default = || ToolCallSyntax::named(architecture.support().tool_call_parser?);
    ToolCallSyntax::of_template(mentions).or_else(default)
}

fn reasoning_family(
    architecture: ModelArchitecture,
    mentions: impl Fn(&str) -> bool,
) -> Option<ReasoningFamily> {
    let default = architecture.support().reasoning_parser.and_then(ReasoningFamily::named);
    ReasoningFamily::of_template(mentions, default)
}

#[cfg(test)]
mod tests;
