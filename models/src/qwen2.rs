//! Qwen2 and Qwen2.5, including distilled models (`Qwen2ForCausalLM`), after transformers
//! `modeling_qwen2.py`.
//!
//! Llama with biases on the query, key and value projections only.
//! Goldens: `tests/data/golden/qwen2-*`.

use crate::layers::DecoderModel;
use crate::llama;

/// Qwen2 model.
pub(crate) type Qwen2Model = DecoderModel<llama::LlamaLayer>;
