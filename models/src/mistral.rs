//! Mistral (`MistralForCausalLM`), after transformers `modeling_mistral.py`.
//!
//! Mistral is Llama without biases. A configuration with an active sliding window is rejected, so every layer
//! attends to the whole context. Reference outputs for tests: `tests/data/golden/mistral-*`.

use crate::layers::DecoderModel;
use crate::llama;

/// Mistral model; its layers equal those of Llama.
pub(crate) type MistralModel = DecoderModel<llama::LlamaLayer>;
