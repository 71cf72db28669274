//! gpt-oss (`GptOssForCausalLM`), based on transformers `modeling_gpt_oss.py`.
//!
//! A layer is GQA with biases and attention sinks, with a sliding window in every second layer, followed by experts
//! with biases and a clamped activation. Norm weights are multiplied in f32. Published checkpoints store the experts
//! in MXFP4. Reference outputs for tests: `tests/data/golden/gpt_oss-*`.

use crate::layers::DecoderModel;
use crate::qwen3_moe::Qwen3MoeLayer;

/// gpt-oss model; its layers differ from Qwen3 MoE layers only in their configuration.
pub(crate) type GptOssModel = DecoderModel<Qwen3MoeLayer>;
