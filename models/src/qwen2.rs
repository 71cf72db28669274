//! Qwen2 and Qwen2.5, also distilled (`Qwen2ForCausalLM`), after transformers `modeling_qwen2.py`.
//!
//! Llama with biases on the query, key and value projections, and on nothing else.
//! Goldens: `tests/data/golden/qwen2-*`.

use crate::layers::DecoderModel;
use crate::llama;

/// The model.
pub(crate) type Qwen2Model = DecoderModel<llama::LlamaLayer>;
