//! Synthetic checkpoints for tests and benchmarks. Each value is a hash of the weight name and the element
//! index, and is exact in every float type. A model of any size can therefore be loaded and sharded without
//! weight files, and the loaded values can be compared with those of a checkpoint that was written to files.

mod synth_tensor;
mod tokenizer;
mod values;
mod write;

pub(crate) use synth_tensor::mxfp4_generators;
pub(crate) use values::SynthDraftVocab;
pub use values::{SynthDistribution, SynthValueGenerator};
pub use write::{SynthDType, SynthError, SynthOptions, write};
