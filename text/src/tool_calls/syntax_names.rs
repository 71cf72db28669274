//! Tool call syntaxes of the model families, with their command-line names.

use super::call_grammar::CallGrammarWriter;
use super::delimited_calls::{FUNCTION_GEMMA, GEMMA4, GemmaCallSyntax};
use super::harmony_grammar;
use super::json_sections::{DEEPSEEK_V3, DEEPSEEK_V31, DeepSeekKimiSyntax, KIMI_K2};
use super::pythonic::CallBlockSyntax;
use super::tag_syntax::{DEEPSEEK_V32, GLM45, GLM47, MINIMAX_M2, QWEN3_CODER, SEED_OSS, TagSyntax};
use super::{
    ToolDefinition, call_grammar, free_grammar, hermes, llama3_json, mistral, named_lines, pythonic,
};
use crate::harmony;
use crate::tokenizer::Tokenizer;

/// Tool call syntax of a model family (`--tool-call-parser`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolCallSyntax {
    /// JSON between `<tool_call>` and `</tool_call>`: Hermes, Qwen2.5, Qwen3.
    Hermes,
    /// XML-like `<function=…>` and `<parameter=…>`: Qwen3-Coder.
    Qwen3Coder,
    /// Qwen3-Coder's tags inside `<seed:tool_call>`: Seed-OSS.
    SeedOss,
    /// `<invoke name="…">` and `<parameter name="…">`: MiniMax M2.
    MiniMaxM2,
    /// The name of a function on its own line, then JSON: GLM-4, GLM-Z1.
    Glm4,
    /// `<arg_key>` and `<arg_value>`, each tag on its own line: GLM 4.5, GLM 4.6.
    Glm45,
    /// `<arg_key>` and `<arg_value>` without line breaks: GLM 4.7.
    Glm47,
    /// JSON without markers: Llama 3, Llama 4.
    Llama3Json,
    /// A list of Python calls: Llama 3.2, Llama 4.
    Pythonic,
    /// Python calls in a fence `tool_code`: Gemma 3.
    ToolCode,
    /// Python calls between `<function_calls>` and `</function_calls>`: OLMo 3.
    Olmo3,
    /// JSON after `[TOOL_CALLS]`: Mistral.
    Mistral,
    /// JSON in a code fence, between special tokens: DeepSeek V3, R1.
    DeepSeekV3,
    /// JSON between special tokens: DeepSeek V3.1.
    DeepSeekV31,
    /// DSML, tags with `｜DSML｜`: DeepSeek V3.2.
    DeepSeekV32,
    /// JSON after `functions.NAME:INDEX`, between special tokens: Kimi K2.
    KimiK2,
    /// JSON array after `<|tool_call|>` or `<tool_call>`: Granite 3.
    Granite,
    /// JSON after `<function_call>`: Granite 20B.
    Granite20b,
    /// JSON array after `functools` or `<|tool_call|>`: Phi-4-mini.
    Phi4Mini,
    /// JSON array, the whole output or in a code fence: xLAM.
    Xlam,
    /// `call:NAME{key:value}` between `<start_function_call>` and `<end_function_call>`: FunctionGemma.
    FunctionGemma,
    /// `call:NAME{key:value}` between `<|tool_call>` and `<tool_call|>`: Gemma 4.
    Gemma4,
    /// Messages to a function, whose text is JSON: gpt-oss. It needs `ReasoningFamily::Harmony`.
    Harmony,
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

impl ToolCallSyntax {
    /// Command-line names of the syntaxes. They equal vLLM's names, except `glm4` and `gemma3_tool_code`,
    /// which vLLM does not have, `harmony`, and SGLang's name `gpt-oss`.
    pub const NAMES: &[(&str, Self)] = &[
        ("hermes", Self::Hermes),
        ("qwen3_coder", Self::Qwen3Coder),
        ("qwen3_xml", Self::Qwen3Coder),
        ("llama3_json", Self::Llama3Json),
        ("llama4_json", Self::Llama3Json),
        ("pythonic", Self::Pythonic),
        ("llama4_pythonic", Self::Pythonic),
        ("gemma3_tool_code", Self::ToolCode),
        ("olmo3", Self::Olmo3),
        ("mistral", Self::Mistral),
        ("deepseek_v3", Self::DeepSeekV3),
        ("deepseek_v31", Self::DeepSeekV31),
        ("deepseek_v32", Self::DeepSeekV32),
        ("kimi_k2", Self::KimiK2),
        ("glm4", Self::Glm4),
        ("glm45", Self::Glm45),
        ("glm47", Self::Glm47),
        ("minimax_m2", Self::MiniMaxM2),
        ("seed_oss", Self::SeedOss),
        ("granite", Self::Granite),
        ("granite-20b-fc", Self::Granite20b),
        ("granite4", Self::Hermes),
        ("phi4_mini_json", Self::Phi4Mini),
        ("xlam", Self::Xlam),
        ("functiongemma", Self::FunctionGemma),
        ("gemma4", Self::Gemma4),
        ("harmony", Self::Harmony),
        ("openai", Self::Harmony),
        ("gpt-oss", Self::Harmony),
    ];

    /// All syntaxes.
    pub const ALL: &[Self] = &[
        Self::Hermes,
        Self::Qwen3Coder,
        Self::SeedOss,
        Self::MiniMaxM2,
        Self::Glm45,
        Self::Glm47,
        Self::Llama3Json,
        Self::Pythonic,
        Self::ToolCode,
        Self::Mistral,
        Self::DeepSeekV3,
        Self::DeepSeekV31,
        Self::DeepSeekV32,
        Self::KimiK2,
        Self::Granite,
        Self::Granite20b,
        Self::Phi4Mini,
        Self::Xlam,
        Self::FunctionGemma,
        Self::Gemma4,
        Self::Harmony,
        Self::Olmo3,
        Self::Glm4,
    ];

    /// Returns the format of tool call ids that this family's templates accept.
    pub fn id_format(self) -> ToolCallIdFormat {
        match self {
            Self::Mistral => ToolCallIdFormat::Nine,
            Self::KimiK2 => ToolCallIdFormat::Function,
            _ => ToolCallIdFormat::Long,
        }
    }

    /// Returns the markers that may be special tokens of a tokenizer; the detokenizer must keep their text,
    /// because the tool call parser needs it.
    pub fn special_markers(self) -> Vec<&'static str> {
        if let Some(tags) = self.tags() {
            return tags.special.to_vec();
        }
        if let Some(section) = self.section() {
            let (open, close) = (section.section_open, section.section_close);
            return vec![open, close, section.call_open, section.call_close, section.separator];
        }
        if let Some(delimited) = self.delimited() {
            return vec![delimited.open, delimited.close, delimited.delimiter];
        }
        match self {
            Self::Llama3Json => vec![llama3_json::TAG],
            Self::Glm4 => vec![named_lines::SEPARATOR],
            Self::Pythonic => vec![pythonic::OPEN, pythonic::CLOSE],
            Self::ToolCode => Vec::new(),
            Self::Olmo3 => vec![pythonic::FUNCTION_CALLS.open, pythonic::FUNCTION_CALLS.close],
            Self::Harmony => harmony::MARKERS.to_vec(),
            Self::Granite20b => vec![hermes::FUNCTION_CALL],
            Self::Mistral => vec![mistral::CALLS, mistral::CALL_ID, mistral::ARGS],
            Self::Granite | Self::Phi4Mini | Self::Xlam => {
                vec!["<|tool_call|>", "<|/tool_call|>", hermes::OPEN, hermes::CLOSE]
            }
            _ => vec![hermes::OPEN, hermes::CLOSE],
        }
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
    ) -> Result<String, call_grammar::CallGrammarError> {
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
    ) -> Result<String, call_grammar::CallGrammarError> {
        let special = |marker: &str| special_token(marker, tokenizer);
        free_grammar::free_grammar(self, tools, multiple, &special)
    }

    /// Returns the Lark expression of the text before an answer that a grammar enforces; empty if answers have
    /// no header.
    pub fn answer_header(self, tokenizer: &Tokenizer) -> String {
        if self != Self::Harmony {
            return String::new();
        }
        let special = |marker: &str| special_token(marker, tokenizer);
        harmony_grammar::answer_header(&CallGrammarWriter::new(self, &special))
    }

    /// Returns the marker that begins every call; `None` if the syntax has none.
    pub(crate) fn opening_marker(self) -> Option<&'static str> {
        if let Some(tags) = self.tags() {
            return Some(tags.wrapper.map_or(tags.call.open, |wrapper| wrapper.open));
        }
        if let Some(delimited) = self.delimited() {
            return Some(delimited.open);
        }
        match self {
            Self::Hermes => Some(hermes::OPEN),
            Self::Granite20b => Some(hermes::FUNCTION_CALL),
            Self::ToolCode | Self::Olmo3 => self.call_block().map(|block| block.open),
            Self::Mistral => Some(mistral::CALLS),
            _ => self.section().map(|section| section.section_open),
        }
    }

    /// Whether calls have Python keyword arguments.
    pub(super) fn is_pythonic(self) -> bool {
        matches!(self, Self::Pythonic | Self::ToolCode | Self::Olmo3)
    }

    /// Returns the markers of a syntax with Python calls that are written one per line.
    pub(super) fn call_block(self) -> Option<&'static CallBlockSyntax> {
        match self {
            Self::ToolCode => Some(&pythonic::TOOL_CODE),
            Self::Olmo3 => Some(&pythonic::FUNCTION_CALLS),
            _ => None,
        }
    }

    /// Returns the tags of a syntax that writes values as plain text.
    pub(super) fn tags(self) -> Option<&'static TagSyntax> {
        match self {
            Self::Qwen3Coder => Some(&QWEN3_CODER),
            Self::SeedOss => Some(&SEED_OSS),
            Self::MiniMaxM2 => Some(&MINIMAX_M2),
            Self::DeepSeekV32 => Some(&DEEPSEEK_V32),
            Self::Glm45 => Some(&GLM45),
            Self::Glm47 => Some(&GLM47),
            _ => None,
        }
    }

    /// Returns the markers of a syntax with delimiters around strings.
    pub(super) fn delimited(self) -> Option<&'static GemmaCallSyntax> {
        match self {
            Self::FunctionGemma => Some(&FUNCTION_GEMMA),
            Self::Gemma4 => Some(&GEMMA4),
            _ => None,
        }
    }

    /// Returns the markers of a syntax that writes the function name before JSON.
    pub(super) fn section(self) -> Option<&'static DeepSeekKimiSyntax> {
        match self {
            Self::DeepSeekV3 => Some(&DEEPSEEK_V3),
            Self::DeepSeekV31 => Some(&DEEPSEEK_V31),
            Self::KimiK2 => Some(&KIMI_K2),
            _ => None,
        }
    }
}

/// Returns the Lark form of `marker` if it is a special token of the tokenizer; `None` if it is plain text.
pub(super) fn special_token(marker: &str, tokenizer: &Tokenizer) -> Option<String> {
    let id = tokenizer.token_id(marker).filter(|&id| tokenizer.is_special(id));
    id.map(|id| format!("<[{id}]>"))
}
