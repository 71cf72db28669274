//! Synthetic checkpoints: weights are a hash of their name and index, exact in every float type, so that
//! a model of any size can be written, loaded, sharded and compared without storing it.

mod tokenizer;
mod values;
mod write;

pub(crate) use values::SynthDraftVocab;
pub use values::{SynthValues, ValueGenerator};
pub use write::{SynthDType, SynthError, SynthOptions, write};
