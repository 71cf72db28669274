//! Mistral (`MistralForCausalLM`), after transformers `modeling_mistral.py`.
//!
//! Llama without biases. An active sliding window is refused by the configuration, so every layer
//! attends to the whole context. Goldens: `tests/data/golden/mistral-*`.

use crate::layers::DecoderModel;
use crate::llama;

/// The model.
pub(crate) type MistralModel = DecoderModel<llama::LlamaLayer>;
