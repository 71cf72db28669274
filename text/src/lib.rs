//! Conversion between text and token ids: tokenizer, chat templates, detokenizer, stop strings, and parsers
//! of reasoning and tool calls. Scheduler and executors use token ids only. Every algorithm here takes time
//! linear in the length of the text and bounded memory.

#![forbid(unsafe_code)]

mod added_tokens;
mod byte_alphabet;
mod declared_tokens;
mod detokenizer;
mod error;
mod families;
mod grammar_vocabulary;
mod harmony;
mod jinja;
mod json_text;
mod large_integers;
mod output_parser;
mod output_pieces;
mod panic_guard;
mod post_processor;
mod pre_tokenizer_patterns;
mod reasoning;
mod special_token_guard;
mod stop_strings;
mod strftime;
mod template;
#[cfg(test)]
mod tests;
mod text_memory;
mod token_count_bound;
mod token_table;
mod tokenizer;
mod tokenizer_files;
mod tokenizer_windows;
mod tool_calls;

pub use detokenizer::{DetokenizeOptions, Detokenizer};
pub use error::{TextError, TextLoadError};
pub use json_text::json_text;
pub use large_integers::{
    integer_of_member, integer_of_object, mark_large_integers, template_integer,
};
pub use output_parser::{OutputParser, OutputParserConfig};
pub use output_pieces::{OutputPiece, OutputPieces};
pub use reasoning::{
    ReasoningFamily, ReasoningMarkers, ReasoningParserOptions, ReasoningStart,
    TokenReasoningTracker,
};
pub use stop_strings::{StopMatcher, StopStrings};
pub use strftime::strftime;
pub use template::{
    ChatInput, ChatTemplate, HiddenChatField, RenderedChat, RequestTemplateRenderer,
    TEMPLATE_BYTES_MAX, serve_templates,
};
pub use text_memory::TEXT_MEMORY_DEFAULT;
pub use tokenizer::Tokenizer;
pub use tokenizer_files::TOKENIZER_FILES;
pub use tool_calls::{
    CallEnforcement, CallGrammarError, HarmonyConstraintScope, ToolCallIdFormat,
    ToolCallParserOptions, ToolCallSyntax, ToolDefinition, closed_arguments, harmony_preamble,
    partial_arguments,
};
