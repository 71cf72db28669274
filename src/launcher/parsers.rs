//! Which syntax a model's outputs are read by: what was named, else what its template or its
//! architecture suggests.

use crate::config::ReplyArgs;
use crate::text::{CallSyntax, ChatTemplate, Parsers, Reasoning, Tokenizer};
use models::Architecture;

/// The parsers of a model.
pub(super) fn of(
    args: &ReplyArgs,
    architecture: Architecture,
    template: Option<&ChatTemplate>,
    tokenizer: &Tokenizer,
) -> Parsers {
    let mentions = |text: &str| template.is_some_and(|template| template.mentions(text));
    let calls = match args.tool_call_parser.as_str() {
        "auto" => Some(calls_of(architecture, mentions)),
        name => named(CallSyntax::NAMES, name),
    };
    let reasoning = match args.reasoning_parser.as_str() {
        "auto" => reasoning_of(architecture, mentions),
        name => named(Reasoning::NAMES, name),
    };
    tracing::info!(?calls, ?reasoning, "parsers of outputs");
    // The switch is in templates of models that think unless it is off.
    let mut parsers = Parsers::new(calls, reasoning, tokenizer);
    parsers.opens_reasoning = mentions("enable_thinking");
    parsers
}

/// The command line has refused unknown names; what is left is `none`.
fn named<T: Copy>(names: &[(&str, T)], name: &str) -> Option<T> {
    names.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
}

fn calls_of(architecture: Architecture, mentions: impl Fn(&str) -> bool) -> CallSyntax {
    // Fine-tuned models keep an architecture and bring a template of their own.
    if mentions("<｜tool▁calls▁begin｜>") {
        return if mentions("```json") { CallSyntax::DeepSeekV3 } else { CallSyntax::DeepSeekV31 };
    }
    if mentions("<function=") {
        return CallSyntax::Qwen3Coder;
    }
    if mentions("<tool_call>") {
        return CallSyntax::Hermes;
    }
    if mentions("[TOOL_CALLS]") {
        return CallSyntax::Mistral;
    }
    match architecture {
        Architecture::Llama | Architecture::LlamaEagle3 => CallSyntax::Llama3Json,
        Architecture::Mistral => CallSyntax::Mistral,
        Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Qwen3Moe => CallSyntax::Hermes,
        Architecture::DeepseekV2 | Architecture::DeepseekV3 => CallSyntax::DeepSeekV3,
    }
}

fn reasoning_of(architecture: Architecture, mentions: impl Fn(&str) -> bool) -> Option<Reasoning> {
    match architecture {
        Architecture::Qwen3 | Architecture::Qwen3Moe => Some(Reasoning::Qwen3),
        _ if !mentions("</think>") => None,
        // V3.1 thinks when asked to; R1 and what was distilled from it always do.
        _ if mentions("thinking") => Some(Reasoning::DeepSeekV3),
        _ => Some(Reasoning::DeepSeekR1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_says_more_than_an_architecture() {
        let calls = |architecture, text: &'static str| calls_of(architecture, |s| text.contains(s));
        assert_eq!(calls(Architecture::Qwen3, ""), CallSyntax::Hermes);
        let coder = "<tool_call>\n<function=example>";
        assert_eq!(calls(Architecture::Qwen3Moe, coder), CallSyntax::Qwen3Coder);
        assert_eq!(calls(Architecture::Llama, ""), CallSyntax::Llama3Json);
        assert_eq!(calls(Architecture::Llama, "<tool_call>"), CallSyntax::Hermes);
        let distilled = "<｜tool▁calls▁begin｜>\n```json";
        assert_eq!(calls(Architecture::Qwen2, distilled), CallSyntax::DeepSeekV3);
        let reasoning = |architecture, text: &'static str| {
            reasoning_of(architecture, |s: &str| text.contains(s))
        };
        assert_eq!(reasoning(Architecture::Qwen3, ""), Some(Reasoning::Qwen3));
        assert_eq!(reasoning(Architecture::Qwen2, ""), None);
        assert_eq!(reasoning(Architecture::Qwen2, "</think>"), Some(Reasoning::DeepSeekR1));
    }
}
