//! Mixtral (`MixtralForCausalLM`), based on transformers `modeling_mixtral.py`.
//!
//! Mixtral is Mistral with experts instead of a dense MLP in every layer. The routing weights of the selected
//! experts are the softmax over their router logits. Reference outputs for tests:
//! `tests/data/golden/mixtral-*`.

use crate::layers::DecoderModel;
use crate::qwen3_moe::Qwen3MoeLayer;

/// Mixtral model, which uses the decoder layer of Qwen3 MoE without QK norm.
pub(crate) type MixtralModel = DecoderModel<Qwen3MoeLayer>;
