//! Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (`Phi3ForCausalLM`), based on transformers `modeling_phi3.py`.
//!
//! Phi-3 is Llama without biases, with longrope scaling and, in Phi-4-mini, partial RoPE. Checkpoints store
//! fused projections. Reference outputs for tests: `tests/data/golden/phi3-*`.

use crate::layers::DecoderModel;
use crate::llama;

/// Phi-3 or Phi-4 model, which uses the decoder layer of Llama.
pub(crate) type Phi3Model = DecoderModel<llama::LlamaLayer>;
