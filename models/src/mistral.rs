//! Mistral (`MistralForCausalLM`), based on transformers `modeling_mistral.py`.
//!
//! Mistral is Llama without biases. A configuration with an active sliding window is rejected, so that every
//! layer attends to the whole context. Reference outputs for tests: `tests/data/golden/mistral-*`.

use crate::layers::DecoderModel;
use crate::llama;

/// Mistral model, which uses the decoder layer of Llama.
pub(crate) type MistralModel = DecoderModel<llama::LlamaLayer>;
