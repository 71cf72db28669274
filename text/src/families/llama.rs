//! Llama 3 and Llama 4.
//!
//! Sources: the chat templates of meta-llama/Llama-3.1-8B-Instruct, Llama-3.2-1B-Instruct and
//! Llama-4-Scout-17B-16E-Instruct.

use crate::tool_calls::{Llama3JsonSyntax, PythonicSyntax, ToolCallSyntax};

impl ToolCallSyntax {
    /// JSON without markers: Llama 3, Llama 4.
    pub const LLAMA3_JSON: Self = Self::new("llama3_json", &Llama3JsonSyntax);

    /// A list of Python calls: Llama 3.2, Llama 4.
    pub const PYTHONIC: Self = Self::new("pythonic", &PythonicSyntax::List);
}
