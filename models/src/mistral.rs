//! Mistral (`MistralForCausalLM`), based on transformers `modeling_mistral.py`.
//!
//! Mistral is Llama without biases; version 0.1 has a sliding window in every layer. Reference outputs for tests: `tests/data/golden/mistral-*`.

use crate::layers::DecoderModel;
use crate::llama;

/// Mistral model, which uses the decoder layer of Llama.
pub(crate) type MistralModel = DecoderModel<llama::LlamaLayer>;
