//! Tests of the selection of parsers.

use super::*;

#[test]
fn chat_template_overrides_architecture_parser() {
    let tool_calls = |architecture, text: &'static str| {
        tool_call_syntax(architecture, |s| text.contains(s)).unwrap()
    };
    assert_eq!(tool_calls(ModelArchitecture::Qwen3, ""), ToolCallSyntax::HERMES);
    let coder = "<tool_call>\n<function=example>";
    assert_eq!(tool_calls(ModelArchitecture::Qwen3Moe, coder), ToolCallSyntax::QWEN3_CODER);
    assert_eq!(tool_calls(ModelArchitecture::Llama, ""), ToolCallSyntax::LLAMA3_JSON);
    assert_eq!(tool_calls(ModelArchitecture::Llama, "<tool_call>"), ToolCallSyntax::HERMES);
    assert_eq!(tool_calls(ModelArchitecture::Gemma3, ""), ToolCallSyntax::TOOL_CODE);
    assert_eq!(tool_calls(ModelArchitecture::Olmo3, ""), ToolCallSyntax::OLMO3);
    let glm4 = "<|assistant|>{{ metadata }}\n{{ content }}<|observation|>";
    assert_eq!(tool_calls(ModelArchitecture::Glm4, glm4), ToolCallSyntax::GLM4);
    assert_eq!(tool_calls(ModelArchitecture::Glm, ""), ToolCallSyntax::GLM4);
    let distilled = "<｜tool▁calls▁begin｜>\n```json";
    assert_eq!(tool_calls(ModelArchitecture::Qwen2, distilled), ToolCallSyntax::DEEPSEEK_V3);
    for (template, syntax) in [
        ("<|tool_calls_section_begin|>", ToolCallSyntax::KIMI_K2),
        ("<tool_call>{{ name }}\n<arg_key>k</arg_key>\n<arg_value>", ToolCallSyntax::GLM45),
        ("<tool_call>{{ name }}<arg_key>k</arg_key><arg_value>", ToolCallSyntax::GLM47),
        ("<seed:tool_call>\n<function=example>", ToolCallSyntax::SEED_OSS),
        ("<minimax:tool_call>", ToolCallSyntax::MINIMAX_M2),
        ("<｜DSML｜function_calls>", ToolCallSyntax::DEEPSEEK_V32),
        ("<|python_start|>", ToolCallSyntax::PYTHONIC),
        ("in ```tool_code fences", ToolCallSyntax::TOOL_CODE),
        ("<function_call> {", ToolCallSyntax::GRANITE_20B),
        ("<function_calls>' + message['function_calls']", ToolCallSyntax::OLMO3),
        ("<|tool_call|>", ToolCallSyntax::GRANITE),
        ("<start_function_call>call:", ToolCallSyntax::FUNCTION_GEMMA),
        ("<|tool_call>call:", ToolCallSyntax::GEMMA4),
        ("<|channel>thought <|tool_call>call:", ToolCallSyntax::GEMMA4),
        ("<|start|>assistant<|channel|>final<|message|>", ToolCallSyntax::HARMONY),
    ] {
        assert_eq!(tool_calls(ModelArchitecture::DeepseekV3, template), syntax, "{template}");
    }
    let reasoning = |architecture, text: &'static str| {
        reasoning_family(architecture, |s: &str| text.contains(s))
    };
    assert_eq!(reasoning(ModelArchitecture::Qwen3, ""), Some(ReasoningFamily::QWEN3));
    assert_eq!(reasoning(ModelArchitecture::Qwen2, ""), None);
    assert_eq!(reasoning(ModelArchitecture::Qwen2, "</think>"), Some(ReasoningFamily::DEEPSEEK_R1));
    let kimi = "<think></think> thinking <|tool_calls_section_begin|>";
    assert_eq!(reasoning(ModelArchitecture::DeepseekV3, kimi), Some(ReasoningFamily::DEEPSEEK_R1));
    assert_eq!(
        reasoning(ModelArchitecture::Llama, "Here is my thought process:"),
        Some(ReasoningFamily::GRANITE)
    );
    assert_eq!(
        reasoning(ModelArchitecture::Llama, "<seed:think>"),
        Some(ReasoningFamily::SEED_OSS)
    );
    assert_eq!(reasoning(ModelArchitecture::Mistral, "[THINK]"), Some(ReasoningFamily::MISTRAL));
    let gemma4 = "'<|channel>thought\n' + message['reasoning'] + '\n<channel|>'";
    assert_eq!(reasoning(ModelArchitecture::Llama, gemma4), Some(ReasoningFamily::GEMMA4));
    assert_eq!(reasoning(ModelArchitecture::Gemma4Multimodal, ""), Some(ReasoningFamily::GEMMA4));
}

#[test]
fn harmony_is_selected_for_both_parsers() {
    let select = |tool_calls: &str, reasoning: &str, template: &'static str| {
        let flags = ParserFlags { tool_calls, reasoning };
        let parsers = flags.selected(ModelArchitecture::Qwen3, |s| template.contains(s));
        parsers.map_err(|error| error.to_string())
    };
    let harmony = Ok(SelectedParsers {
        tool_calls: Some(ToolCallSyntax::HARMONY),
        reasoning: Some(ReasoningFamily::HARMONY),
    });
    assert_eq!(select("auto", "auto", "<|channel|>"), harmony);
    for (calls, reasoning) in
        [("harmony", "harmony"), ("openai", "auto"), ("auto", "openai_gptoss")]
    {
        assert_eq!(select(calls, reasoning, "<tool_call>"), harmony);
    }
    let none = Ok(SelectedParsers { tool_calls: None, reasoning: None });
    assert_eq!(select("none", "none", "<|channel|>"), none);
    for (calls, reasoning) in
        [("none", "auto"), ("auto", "none"), ("hermes", "auto"), ("harmony", "qwen3")]
    {
        let error = select(calls, reasoning, "<|channel|>").unwrap_err();
        assert!(error.contains("in the harmony format"), "{error}");
    }
}

/// Parsers that a chat template without markers leaves to the architecture.
#[test]
fn every_architecture_has_its_default_parsers() {
    let flags = ParserFlags { tool_calls: "auto", reasoning: "auto" };
    let rows = ModelArchitecture::ALL.map(|architecture| {
        let parsers = flags.selected(architecture, |_| false).unwrap();
        let [calls, reasoning] = [syntax_name(parsers.tool_calls), family_name(parsers.reasoning)];
        format!("{architecture}: {calls}, {reasoning}\n")
    });
    let expected = [
        "LlamaForCausalLM: llama3_json, none",
        "MistralForCausalLM: mistral, none",
        "Mistral3ForConditionalGeneration: mistral, none",
        "Ministral3ForCausalLM: mistral, none",
        "MixtralForCausalLM: mistral, none",
        "Qwen2ForCausalLM: hermes, none",
        "Qwen2MoeForCausalLM: hermes, none",
        "Qwen3ForCausalLM: hermes, qwen3",
        "Qwen3MoeForCausalLM: hermes, qwen3",
        "Qwen3VLForConditionalGeneration: hermes, qwen3",
        "Qwen3VLMoeForConditionalGeneration: hermes, qwen3",
        "GraniteForCausalLM: granite, none",
        "GraniteMoeHybridForCausalLM: hermes, none",
        "SmolLM3ForCausalLM: hermes, qwen3",
        "Olmo2ForCausalLM: none, none",
        "Olmo3ForCausalLM: olmo3, none",
        "SeedOssForCausalLM: seed_oss, none",
        "Ernie4_5ForCausalLM: none, none",
        "GlmForCausalLM: glm4, none",
        "Glm4ForCausalLM: glm4, none",
        "DeepseekV2ForCausalLM: deepseek_v3, none",
        "DeepseekV3ForCausalLM: deepseek_v3, none",
        "Phi3ForCausalLM: phi4_mini_json, none",
        "Gemma3ForCausalLM: gemma3_tool_code, none",
        "Gemma3ForConditionalGeneration: gemma3_tool_code, none",
        "Gemma4ForCausalLM: gemma4, gemma4",
        "Gemma4ForConditionalGeneration: gemma4, gemma4",
        "Gemma4UnifiedForConditionalGeneration: gemma4, gemma4",
        "GptOssForCausalLM: hermes, none",
        "Qwen3NextForCausalLM: hermes, none",
        "Qwen3_5ForCausalLM: qwen3_coder, qwen3",
        "Qwen3_5ForConditionalGeneration: qwen3_coder, qwen3",
        "Qwen3_5MoeForCausalLM: qwen3_coder, qwen3",
        "Qwen3_5MoeForConditionalGeneration: qwen3_coder, qwen3",
        "LlamaForCausalLMEagle3: llama3_json, none",
    ];
    assert_eq!(rows.concat(), expected.map(|row| format!("{row}\n")).concat());
}

/// A template with markers decides also for an architecture whose models have no tool calls.
#[test]
fn template_markers_select_parsers_of_any_architecture() {
    for architecture in ModelArchitecture::ALL {
        let template = "<tool_call> </think>";
        let flags = ParserFlags { tool_calls: "auto", reasoning: "auto" };
        let parsers = flags.selected(architecture, |s| template.contains(s)).unwrap();
        assert_eq!(parsers.tool_calls, Some(ToolCallSyntax::HERMES), "{architecture}");
        assert!(parsers.reasoning.is_some(), "{architecture}");
    }
}
