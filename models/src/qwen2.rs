//! Qwen2 and Qwen2.5, including distilled models (`Qwen2ForCausalLM`), based on transformers
//! `modeling_qwen2.py`.
//!
//! Qwen2 is Llama with biases only on the query, key and value projections. Reference outputs for tests:
//! `tests/data/golden/qwen2-*`.

use crate::layers::DecoderModel;
use crate::llama;

/// Qwen2 or Qwen2.5 model, which uses the decoder layer of Llama.
pub(crate) type Qwen2Model = DecoderModel<llama::LlamaLayer>;
