//! Errors of model loading and of forward passes. Every variant of a loading error names the file, tensor or
//! setting to check.

use crate::ModelConfigError;
use crate::sharding::UnevenSplitError;
use collectives::CollectiveError;
use ops::OpError;
use std::path::PathBuf;

/// Error of a forward pass.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// An operation failed on this rank's device, or the model passed invalid arguments to it.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A collective operation of the forward pass failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// Draft tokens were requested, but no MTP module was loaded.
    #[error("no MTP module was loaded")]
    NoMtpModule,
    /// A draft pass of an EAGLE-3 model got no hidden states of the target model.
    #[error("a draft pass needs hidden states of the target model")]
    NoHiddenStates,
}

/// Error while a checkpoint is loaded: the checkpoint is invalid or not supported.
#[derive(Debug, thiserror::Error)]
pub enum ModelLoadError {
    /// The model configuration is invalid.
    #[error(transparent)]
    Config(#[from] ModelConfigError),
    /// A file of the model folder cannot be read.
    #[error("{path}: {error}")]
    Io {
        /// Path of the file that cannot be read.
        path: PathBuf,
        /// Error of the operating system.
        error: std::io::Error,
    },
    /// The model folder has no safetensors weights.
    #[error("{dir}: no model.safetensors and no model.safetensors.index.json{hint}")]
    NoWeights {
        /// Path of the model folder.
        dir: PathBuf,
        /// Text about weights in other formats that the model folder contains, for the error message.
        hint: &'static str,
    },
    /// The header, data or index of a weight file is inconsistent.
    #[error("{path}: {fault}")]
    File {
        /// Path of the weight file.
        path: PathBuf,
        /// Error in the file's header, data or index.
        fault: WeightFileError,
    },
    /// A tensor contradicts its file, the index or the configuration.
    #[error("{path}: tensor `{tensor}`: {fault}")]
    Tensor {
        /// Path of the weight file that contains the tensor.
        path: PathBuf,
        /// Name of the invalid tensor.
        tensor: String,
        /// Error in the tensor's metadata or values.
        fault: StoredTensorError,
    },
    /// The checkpoint contains tensors that the model does not use, or lacks weights that the configuration
    /// requires.
    #[error("{dir}: weights do not match the configuration: {}", coverage(missing, unexpected))]
    Coverage {
        /// Path of the model folder.
        dir: PathBuf,
        /// Names of weights that the configuration requires and the checkpoint lacks.
        missing: Vec<String>,
        /// Names of stored tensors that the model does not use.
        unexpected: Vec<String>,
    },
    /// The expert placement does not fit the model or the ranks.
    #[error(transparent)]
    Placement(#[from] crate::ExpertPlacementError),
    /// The checkpoint is an EAGLE-3 draft model, which only runs together with a target model.
    #[error("{dir}: LlamaForCausalLMEagle3 is a draft model and requires a target model")]
    DraftModelOnly {
        /// Path of the model folder.
        dir: PathBuf,
    },
    /// A weight cannot be split evenly over the ranks.
    #[error("tensor `{tensor}`: {error}")]
    Split {
        /// Name of the tensor of the weight.
        tensor: String,
        /// Dimension that cannot be split, its size and the number of ranks.
        error: UnevenSplitError,
    },
    /// Internal error: the model code reads a weight that is not in the weight table, or does not read a
    /// weight that is in the table.
    #[error("weight `{tensor}` {what}: the model and the weight table disagree")]
    Table {
        /// Name of the weight on which the model and the weight table disagree.
        tensor: String,
        /// Description of the mismatch between the model and the weight table.
        what: &'static str,
    },
    /// The device rejected an operation while a weight was loaded.
    #[error("weight `{tensor}`: {error}")]
    Device {
        /// Name of the weight that was being loaded.
        tensor: String,
        /// Error of the device.
        error: ops::OpError,
    },
}

impl ModelLoadError {
    /// Error for a weight on which the model and the weight table disagree.
    pub(crate) fn table(tensor: &str, what: &'static str) -> Self {
        Self::Table { tensor: tensor.to_owned(), what }
    }
}

/// Error that concerns a whole safetensors file or a whole index.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WeightFileError {
    /// The weight file is shorter than the 8 bytes of the header length.
    #[error("{bytes} bytes are too short for a safetensors file")]
    Short {
        /// Size of the weight file in bytes.
        bytes: usize,
    },
    /// The header length exceeds the weight file, or the limit of the safetensors format.
    #[error("the header length is {stated} bytes, but the limit is {limit}")]
    HeaderLength {
        /// Header length that the weight file states, in bytes.
        stated: u64,
        /// Largest header length that the size of the file and the safetensors format allow, in bytes.
        limit: u64,
    },
    /// The header is not valid JSON, or not a header of the safetensors format.
    #[error("invalid header: {detail}")]
    Header {
        /// Position and reason of the parse error in the header.
        detail: String,
    },
    /// The data section is longer or shorter than the tensors in the header.
    #[error("tensors end at byte {end} of the data, but there are {bytes}")]
    End {
        /// Offset of the end of the last tensor, relative to the start of the data section.
        end: u64,
        /// Size of the data section after the header, in bytes.
        bytes: u64,
    },
    /// The index is not valid JSON, or not an index of the safetensors format.
    #[error("invalid index: {detail}")]
    Index {
        /// Position and reason of the parse error in the index.
        detail: String,
    },
    /// A name in the index contains a folder instead of only a file name, so that it may refer to a file
    /// outside of the model folder.
    #[error("`{name}` is not the name of a file in this folder")]
    Outside {
        /// Invalid file name in the index.
        name: String,
    },
}

/// Error that concerns one tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoredTensorError {
    /// The header declares a dtype that the safetensors format does not have.
    #[error("dtype `{0}` is unknown")]
    UnknownDType(String),
    /// The stored dtype is not supported for weights.
    #[error("dtype {0} is not supported for weights; F32, BF16 and F16 are")]
    WrongDType(&'static str),
    /// The byte offsets of the tensor are in the wrong order or beyond the data section.
    #[error("bytes [{start}, {end}) are outside of the {bytes} bytes of data")]
    Offsets {
        /// Offset of the tensor's first byte in the data section.
        start: u64,
        /// Offset after the tensor's last byte in the data section.
        end: u64,
        /// Size of the data section in bytes.
        bytes: u64,
    },
    /// The byte offsets of the tensor leave a gap after the previous tensor, or overlap it.
    #[error("starts at byte {start} of the data, but the tensor before it ends at {expected}")]
    Gap {
        /// Offset of the tensor's first byte in the data section.
        start: u64,
        /// Offset after the last byte of the previous tensor, at which this tensor must start.
        expected: u64,
    },
    /// The number of bytes between the tensor's offsets differs from the size that shape and dtype require.
    #[error("shape {shape:?} of {dtype} does not match {bytes} bytes")]
    Size {
        /// Shape that the safetensors header declares.
        shape: Vec<u64>,
        /// Dtype that the safetensors header declares.
        dtype: &'static str,
        /// Number of bytes between the tensor's offsets in the header.
        bytes: u64,
    },
    /// The target token id of a draft token id is outside of the target vocabulary.
    #[error("target id {draft} {offset:+} of draft id {draft} is outside of the {ids} target ids")]
    Offset {
        /// Draft token id whose target token id is invalid.
        draft: usize,
        /// Stored offset from the draft token id to the target token id.
        offset: i64,
        /// Size of the target vocabulary.
        ids: usize,
    },
    /// The dtype is not supported for stored offsets from draft token ids to target token ids.
    #[error("dtype {0} is not supported for draft id offsets; I64 is")]
    OffsetDType(&'static str),
    /// A scale of the quantised KV cache or of activations is not a finite number above 0.
    #[error("scale {0} is not a finite number above 0")]
    Scale(String),
    /// The number of KV cache scales is neither 1 nor the number of KV heads.
    #[error("{got} scales, but the model has {heads} KV heads")]
    HeadScales {
        /// Number of stored scales.
        got: usize,
        /// Number of KV heads of the model.
        heads: usize,
    },
    /// The stored shape differs from the shape that the configuration requires.
    #[error("shape {found:?}, but the configuration requires {expected:?}")]
    Shape {
        /// Shape of the stored tensor.
        found: Vec<u64>,
        /// Shape that the configuration requires for the tensor.
        expected: Vec<u64>,
    },
    /// Two weight files contain a tensor of this name.
    #[error("is also stored in {other}")]
    Duplicate {
        /// Path of the second weight file that contains a tensor of this name.
        other: String,
    },
    /// The index assigns the tensor to a weight file that does not contain it.
    #[error("is in the index but not in the file")]
    NotInFile,
    /// A weight file contains a tensor that the index does not assign to this file.
    #[error("is in the file, but the index {0}")]
    NotInIndex(String),
    /// A weight is stored as its own tensor and in a fused tensor.
    #[error("contains the weight `{0}`, which is also stored separately")]
    StoredTwice(String),
    /// Two stored tensors have different spellings of the same weight name.
    #[error("is another spelling of `{0}`, which is also stored")]
    OtherSpelling(String),
    /// The MTP module stores a copy of a weight, and the copy differs from the original.
    #[error("differs from `{0}`, of which it must be a copy")]
    Copy(&'static str),
    /// A scale is stored under two names, and the two values differ.
    #[error("differs from `{0}`, which is another name of this scale")]
    ScaleSpelling(String),
    /// The stored LM head differs from the embedding that it is tied to.
    #[error("differs from the embedding, but tie_word_embeddings is true")]
    TiedHead,
}

/// Formats the missing and the unexpected tensors, with each list truncated to a length that fits a terminal.
fn coverage(missing: &[String], unexpected: &[String]) -> String {
    const LISTED_MAX: usize = 16;
    let list = |title: &str, names: &[String]| {
        let mut text = format!("{} {title}", names.len());
        for (i, name) in names.iter().take(LISTED_MAX).enumerate() {
            text += if i == 0 { ": " } else { ", " };
            text += name;
        }
        if names.len() > LISTED_MAX { text + ", ..." } else { text }
    };
    format!("{}; {}", list("missing", missing), list("unexpected", unexpected))
}
