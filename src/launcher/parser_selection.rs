//! Selects the reasoning parser and the tool-call parser of a model: by flag, else by its chat template or
//! architecture.

use crate::config::ReplyArgs;
use anyhow::{Result, bail};
use models::ModelArchitecture;
use text::{ChatTemplate, OutputParserConfig, ReasoningFamily, Tokenizer, ToolCallSyntax};

/// Marker that only chat templates in the harmony format print.
const HARMONY_MARKER: &str = "<|channel|>";

/// Marker of the reasoning in chat templates of Gemma 4.
const GEMMA4_REASONING: &str = "<|channel>thought";

/// Markers that a chat template prints, with the tool call syntax that they belong to. A marker that also occurs
/// in another syntax comes after the markers of that syntax.
const TEMPLATE_MARKERS: &[(&str, ToolCallSyntax)] = &[
    (HARMONY_MARKER, ToolCallSyntax::Harmony),
    ("｜DSML｜", ToolCallSyntax::DeepSeekV32),
    ("<|tool_calls_section_begin|>", ToolCallSyntax::KimiK2),
    ("<minimax:tool_call>", ToolCallSyntax::MiniMaxM2),
    ("<seed:tool_call>", ToolCallSyntax::SeedOss),
    ("</arg_key><arg_value>", ToolCallSyntax::Glm47),
    ("<arg_key>", ToolCallSyntax::Glm45),
    ("functools[", ToolCallSyntax::Phi4Mini),
    ("<start_function_call>", ToolCallSyntax::FunctionGemma),
    ("<|tool_call>", ToolCallSyntax::Gemma4),
    ("<|tool_call|>", ToolCallSyntax::Granite),
    ("<|python_start|>", ToolCallSyntax::Pythonic),
    ("```tool_code", ToolCallSyntax::ToolCode),
    ("<function_calls>", ToolCallSyntax::Olmo3),
    ("<function_call>", ToolCallSyntax::Granite20b),
    ("<function=", ToolCallSyntax::Qwen3Coder),
    ("<tool_call>", ToolCallSyntax::Hermes),
    ("[TOOL_CALLS]", ToolCallSyntax::Mistral),
];

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
        tool_calls = parser_name(tool_calls),
        reasoning = parser_name(reasoning),
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
        let is_harmony = self.tool_calls == Some(ToolCallSyntax::Harmony);
        if is_harmony != (self.reasoning == Some(ReasoningFamily::Harmony)) {
            bail!(
                "--tool-call-parser {} and --reasoning-parser {}: in the harmony format, one parser reads \
             reasoning and tool calls; select harmony or none with both flags",
                parser_name(self.tool_calls),
                parser_name(self.reasoning)
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
        let named_calls = parser_by_name(self.tool_calls);
        let named_reasoning = parser_by_name(self.reasoning);
        let tool_calls = match self.tool_calls {
            "auto" if named_reasoning == Some(ReasoningFamily::Harmony) => {
                Some(ToolCallSyntax::Harmony)
            }
            "auto" => tool_call_syntax(architecture, &mentions),
            _ => named_calls,
        };
        let reasoning = match self.reasoning {
            "auto" if named_calls == Some(ToolCallSyntax::Harmony) => {
                Some(ReasoningFamily::Harmony)
            }
            "auto" => reasoning_family(architecture, &mentions),
            _ => named_reasoning,
        };
        let selected = SelectedParsers { tool_calls, reasoning };
        selected.check_harmony()?;
        Ok(selected)
    }
}

/// Kind of parser with command-line names.
trait NamedParser: Copy + PartialEq + 'static {
    /// The names and the parsers that they select.
    const PARSERS: &'static [(&'static str, Self)];
}

impl NamedParser for ToolCallSyntax {
    const PARSERS: &'static [(&'static str, Self)] = Self::NAMES;
}

impl NamedParser for ReasoningFamily {
    const PARSERS: &'static [(&'static str, Self)] = Self::NAMES;
}

/// Returns the parser with the given name; `None` for `none`. Unknown names have been rejected before.
fn parser_by_name<T: NamedParser>(name: &str) -> Option<T> {
    T::PARSERS.iter().find(|(candidate, _)| *candidate == name).map(|(_, value)| *value)
}

/// Returns the command-line name of a parser; `none` without a parser.
fn parser_name<T: NamedParser>(parser: Option<T>) -> &'static str {
    let named = T::PARSERS.iter().find(|(_, value)| Some(*value) == parser);
    named.map_or("none", |(name, _)| name)
}

/// Selects the syntax of tool calls. `None` = neither the chat template nor the models of the architecture have
/// tool calls.
fn tool_call_syntax(
    architecture: ModelArchitecture,
    mentions: impl Fn(&str) -> bool,
) -> Option<ToolCallSyntax> {
    // The chat template is checked before the architecture: a fine-tuned model has the architecture of its
    // base model, but often another chat template.
    if mentions("<｜tool▁calls▁begin｜>") {
        return Some(if mentions("```json") {
            ToolCallSyntax::DeepSeekV3
        } else {
            ToolCallSyntax::DeepSeekV31
        });
    }
    if let Some((_, syntax)) = TEMPLATE_MARKERS.iter().find(|(marker, _)| mentions(marker)) {
        return Some(*syntax);
    }
    default_tool_call_syntax(architecture)
}

/// Syntax of the tool calls of the models for which an architecture was made; `None` = they have no tool calls.
fn default_tool_call_syntax(architecture: ModelArchitecture) -> Option<ToolCallSyntax> {
    Some(match architecture {
        ModelArchitecture::Olmo2 | ModelArchitecture::Ernie45 => return None,
        ModelArchitecture::Llama | ModelArchitecture::LlamaEagle3 => ToolCallSyntax::Llama3Json,
        ModelArchitecture::Mistral
        | ModelArchitecture::Mistral3
        | ModelArchitecture::Ministral3
        | ModelArchitecture::Mixtral => ToolCallSyntax::Mistral,
        ModelArchitecture::Qwen2
        | ModelArchitecture::Qwen2Moe
        | ModelArchitecture::Qwen3
        | ModelArchitecture::Qwen3Moe
        | ModelArchitecture::Qwen3Vl
        | ModelArchitecture::Qwen3VlMoe
        | ModelArchitecture::GraniteMoeHybrid
        | ModelArchitecture::SmolLm3
        | ModelArchitecture::Qwen3Next
        | ModelArchitecture::GptOss => ToolCallSyntax::Hermes,
        ModelArchitecture::Qwen35
        | ModelArchitecture::Qwen35Multimodal
        | ModelArchitecture::Qwen35Moe
        | ModelArchitecture::Qwen35MoeMultimodal => ToolCallSyntax::Qwen3Coder,
        ModelArchitecture::Glm | ModelArchitecture::Glm4 => ToolCallSyntax::Glm4,
        ModelArchitecture::Granite => ToolCallSyntax::Granite,
        ModelArchitecture::Olmo3 => ToolCallSyntax::Olmo3,
        ModelArchitecture::SeedOss => ToolCallSyntax::SeedOss,
        ModelArchitecture::Phi3 => ToolCallSyntax::Phi4Mini,
        ModelArchitecture::Gemma3 | ModelArchitecture::Gemma3Multimodal => ToolCallSyntax::ToolCode,
        ModelArchitecture::Gemma4
        | ModelArchitecture::Gemma4Multimodal
        | ModelArchitecture::Gemma4Unified => ToolCallSyntax::Gemma4,
        ModelArchitecture::DeepseekV2 | ModelArchitecture::DeepseekV3 => ToolCallSyntax::DeepSeekV3,
    })
}

fn reasoning_family(
    architecture: ModelArchitecture,
    mentions: impl Fn(&str) -> bool,
) -> Option<ReasoningFamily> {
    match architecture {
        _ if mentions(HARMONY_MARKER) => Some(ReasoningFamily::Harmony),
        _ if mentions("<seed:think>") => Some(ReasoningFamily::SeedOss),
        _ if mentions("[THINK]") => Some(ReasoningFamily::Mistral),
        _ if mentions("Here is my thought process:") => Some(ReasoningFamily::Granite),
        _ if mentions(GEMMA4_REASONING) || architecture.is_gemma4() => {
            Some(ReasoningFamily::Gemma4)
        }
        ModelArchitecture::Qwen3
        | ModelArchitecture::Qwen3Moe
        | ModelArchitecture::Qwen3Vl
        | ModelArchitecture::Qwen3VlMoe
        | ModelArchitecture::Qwen35
        | ModelArchitecture::Qwen35Multimodal
        | ModelArchitecture::Qwen35Moe
        | ModelArchitecture::Qwen35MoeMultimodal
        | ModelArchitecture::SmolLm3 => Some(ReasoningFamily::Qwen3),
        _ if !mentions("</think>") => None,
        // Kimi K2 always reasons. Its template contains `thinking`, so this match arm must precede the arm of
        // DeepSeek V3.1.
        _ if mentions("<|tool_calls_section_begin|>") => Some(ReasoningFamily::DeepSeekR1),
        // DeepSeek V3.1 reasons only if the request enables it. R1 and models distilled from R1 always
        // reason.
        _ if mentions("thinking") => Some(ReasoningFamily::DeepSeekV3),
        _ => Some(ReasoningFamily::DeepSeekR1),
    }
}

#[cfg(test)]
mod tests;
