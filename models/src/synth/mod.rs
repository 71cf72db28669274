//! Synthetic checkpoints for tests and benchmarks. Each value is a hash of the weight's name and the
//! element's index, and is exact in every float type. A model of any size can thus be loaded and sharded
//! without weight files, and compared with a written checkpoint.

mod synth_tensor;
mod tokenizer;
mod values;
mod write;

pub(crate) use values::SynthDraftVocab;
pub use values::{SynthDistribution, SynthValueGenerator};
pub use write::{SynthDType, SynthError, SynthOptions, write};
