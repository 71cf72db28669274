//! Mistral (`MistralForCausalLM`), after transformers `modeling_mistral.py`.
//!
//! Llama without biases. The configuration rejects an active sliding window, so every layer
//! attends to the whole context. Goldens: `tests/data/golden/mistral-*`.

use crate::layers::DecoderModel;
use crate::llama;

/// Mistral model.
pub(crate) type MistralModel = DecoderModel<llama::LlamaLayer>;
