//! Output formats of the model families: tool call syntaxes and reasoning formats, with one file per family. A new format
//! is defined in the file of its family, and is added to the lists here; no other file names it.
//!
//! Families whose formats differ only in markers share a parser and a grammar of `tool_calls`, and differ in data.

mod deepseek;
mod gemma;
mod glm;
mod gpt_oss;
mod granite;
mod hermes;
mod kimi;
mod llama;
mod minimax;
mod mistral;
mod olmo;
mod phi;
mod qwen;
mod seed_oss;
mod xlam;

use super::reasoning::ReasoningFamily;
use super::tool_calls::ToolCallSyntax;

/// Selects a format if a chat template prints all of `markers`.
struct TemplateRule<T> {
    markers: &'static [&'static str],
    format: T,
}

/// Returns the format of the first of `rules` whose markers a chat template prints.
fn first_match<T: Copy>(rules: &[TemplateRule<T>], mentions: impl Fn(&str) -> bool) -> Option<T> {
    let matches = |rule: &&TemplateRule<T>| rule.markers.iter().all(|marker| mentions(marker));
    rules.iter().find(matches).map(|rule| rule.format)
}

const fn rule<T>(markers: &'static [&'static str], format: T) -> TemplateRule<T> {
    TemplateRule { markers, format }
}

impl ToolCallSyntax {
    /// Command-line names of the syntaxes. They equal vLLM's names, except `glm4` and `gemma3_tool_code`,
    /// which vLLM does not have, `harmony`, and SGLang's name `gpt-oss`.
    pub const NAMES: &[(&str, Self)] = &[
        ("hermes", Self::HERMES),
        ("qwen3_coder", Self::QWEN3_CODER),
        ("qwen3_xml", Self::QWEN3_CODER),
        ("llama3_json", Self::LLAMA3_JSON),
        ("llama4_json", Self::LLAMA3_JSON),
        ("pythonic", Self::PYTHONIC),
        ("llama4_pythonic", Self::PYTHONIC),
        ("gemma3_tool_code", Self::TOOL_CODE),
        ("olmo3", Self::OLMO3),
        ("mistral", Self::MISTRAL),
        ("deepseek_v3", Self::DEEPSEEK_V3),
        ("deepseek_v31", Self::DEEPSEEK_V31),
        ("deepseek_v32", Self::DEEPSEEK_V32),
        ("kimi_k2", Self::KIMI_K2),
        ("glm4", Self::GLM4),
        ("glm45", Self::GLM45),
        ("glm47", Self::GLM47),
        ("minimax_m2", Self::MINIMAX_M2),
        ("seed_oss", Self::SEED_OSS),
        ("granite", Self::GRANITE),
        ("granite-20b-fc", Self::GRANITE_20B),
        ("granite4", Self::HERMES),
        ("phi4_mini_json", Self::PHI4_MINI),
        ("xlam", Self::XLAM),
        ("functiongemma", Self::FUNCTION_GEMMA),
        ("gemma4", Self::GEMMA4),
        ("harmony", Self::HARMONY),
        ("openai", Self::HARMONY),
        ("gpt-oss", Self::HARMONY),
    ];

    /// Markers in chat templates, with the syntax that they belong to. Markers that also occur in templates of another
    /// syntax come after the markers of that syntax.
    const TEMPLATE_RULES: &[TemplateRule<Self>] = &[
        rule(&["<｜tool▁calls▁begin｜>", "```json"], Self::DEEPSEEK_V3),
        rule(&["<｜tool▁calls▁begin｜>"], Self::DEEPSEEK_V31),
        rule(&["<|channel|>"], Self::HARMONY),
        rule(&["｜DSML｜"], Self::DEEPSEEK_V32),
        rule(&["<|tool_calls_section_begin|>"], Self::KIMI_K2),
        rule(&["<minimax:tool_call>"], Self::MINIMAX_M2),
        rule(&["<seed:tool_call>"], Self::SEED_OSS),
        rule(&["</arg_key><arg_value>"], Self::GLM47),
        rule(&["<arg_key>"], Self::GLM45),
        rule(&["functools["], Self::PHI4_MINI),
        rule(&["<start_function_call>"], Self::FUNCTION_GEMMA),
        rule(&["<|tool_call>"], Self::GEMMA4),
        rule(&["<|tool_call|>"], Self::GRANITE),
        rule(&["<|python_start|>"], Self::PYTHONIC),
        rule(&["```tool_code"], Self::TOOL_CODE),
        rule(&["<function_calls>"], Self::OLMO3),
        rule(&["<function_call>"], Self::GRANITE_20B),
        rule(&["<function="], Self::QWEN3_CODER),
        rule(&["<tool_call>"], Self::HERMES),
        rule(&["[TOOL_CALLS]"], Self::MISTRAL),
    ];

    /// Returns all syntaxes.
    pub fn all() -> Vec<Self> {
        distinct(Self::NAMES.iter().map(|(_, format)| *format))
    }

    /// Returns the syntax with the command-line name `name`.
    pub fn named(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, format)| *format)
    }

    /// Returns the syntax that a chat template prints, which `mentions` searches for a text; `None` = the template has no
    /// marker of a syntax.
    pub fn of_template(mentions: impl Fn(&str) -> bool) -> Option<Self> {
        first_match(Self::TEMPLATE_RULES, mentions)
    }
}

impl ReasoningFamily {
    /// Command-line names of the reasoning formats, as in vLLM; `gpt-oss` is SGLang's name.
    pub const NAMES: &[(&str, Self)] = &[
        ("qwen3", Self::QWEN3),
        ("deepseek_r1", Self::DEEPSEEK_R1),
        ("deepseek_v3", Self::DEEPSEEK_V3),
        ("gemma4", Self::GEMMA4),
        ("glm45", Self::QWEN3),
        ("glm47", Self::QWEN3),
        ("kimi_k2", Self::DEEPSEEK_R1),
        ("minimax_m2", Self::DEEPSEEK_R1),
        ("granite", Self::GRANITE),
        ("mistral", Self::MISTRAL),
        ("nemotron_v3", Self::DEEPSEEK_R1),
        ("seed_oss", Self::SEED_OSS),
        ("step3", Self::DEEPSEEK_R1),
        ("harmony", Self::HARMONY),
        ("openai_gptoss", Self::HARMONY),
        ("gpt-oss", Self::HARMONY),
    ];

    /// Markers in chat templates that belong to one format only.
    const TEMPLATE_RULES: &[TemplateRule<Self>] = &[
        rule(&["<|channel|>"], Self::HARMONY),
        rule(&["<seed:think>"], Self::SEED_OSS),
        rule(&["[THINK]"], Self::MISTRAL),
        rule(&["Here is my thought process:"], Self::GRANITE),
        rule(&["<|channel>thought"], Self::GEMMA4),
    ];

    /// Markers in chat templates that several formats share; the format of the architecture takes precedence.
    const THINK_TAG_RULES: &[TemplateRule<Self>] = &[
        // Kimi K2 always reasons. Its template contains `thinking`, so this rule must precede the rule of DeepSeek V3.1.
        rule(&["</think>", "<|tool_calls_section_begin|>"], Self::DEEPSEEK_R1),
        // DeepSeek V3.1 reasons only if the request enables it. R1 and models distilled from R1 always reason.
        rule(&["</think>", "thinking"], Self::DEEPSEEK_V3),
        rule(&["</think>"], Self::DEEPSEEK_R1),
    ];

    /// Returns all formats.
    pub fn all() -> Vec<Self> {
        distinct(Self::NAMES.iter().map(|(_, format)| *format))
    }

    /// Returns the format with the command-line name `name`.
    pub fn named(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, format)| *format)
    }

    /// Returns the format that a chat template prints, which `mentions` searches for a text; `default` is the format of
    /// the architecture. `None` = neither has a reasoning format.
    pub fn of_template(mentions: impl Fn(&str) -> bool, default: Option<Self>) -> Option<Self> {
        first_match(Self::TEMPLATE_RULES, &mentions)
            .or(default)
            .or_else(|| first_match(Self::THINK_TAG_RULES, &mentions))
    }
}

/// Returns each of `formats` once.
fn distinct<T: PartialEq>(formats: impl Iterator<Item = T>) -> Vec<T> {
    let mut found = Vec::new();
    for format in formats {
        if !found.contains(&format) {
            found.push(format);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Formats with the same name would be equal.
    #[test]
    fn each_format_has_its_own_name() {
        for syntax in ToolCallSyntax::all() {
            assert_eq!(ToolCallSyntax::named(syntax.name()), Some(syntax));
        }
        for family in ReasoningFamily::all() {
            assert_eq!(ReasoningFamily::named(family.name()), Some(family));
        }
    }
}
