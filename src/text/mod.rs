//! Between people's text and token ids: tokenizer, chat template, detokeniser, stop strings.
//! Everything below this module knows ids only; everything here is bounded and linear.

mod added;
mod contained;
mod detokenizer;
mod error;
mod grammar_vocabulary;
mod guard;
mod json_python;
mod length_bound;
mod memory;
mod output;
mod pieces;
mod reasoning;
mod stop;
mod strftime;
mod surroundings;
mod template;
#[cfg(test)]
mod tests;
mod tokenizer;
mod tool_calls;
mod vocabulary;
mod windows;

pub use detokenizer::{DetokenizeOptions, Detokenizer};
pub use error::{LoadError, TextError};
pub use memory::TEXT_MEMORY_DEFAULT;
pub use output::{OutputParser, Parsers};
pub use pieces::{Piece, PieceList};
pub use reasoning::{Beginning, Reasoning, ReasoningReader};
pub use stop::{StopMatcher, StopSet};
pub use strftime::strftime;
pub use template::{
    ChatInput, ChatTemplate, Rendered, RequestTemplates, TEMPLATE_BYTES_MAX, serve_templates,
};
pub use tokenizer::Tokenizer;
pub use tool_calls::{CallIds, CallSyntax, Tool, cut_arguments};
