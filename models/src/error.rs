//! Errors of model loading. Every variant names the file, tensor or setting to check.

use crate::ModelConfigError;
use crate::sharding::UnevenSplit;
use std::path::PathBuf;

/// Checkpoint that cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ModelLoadError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ModelConfigError),
    /// A file cannot be read.
    #[error("{path}: {error}")]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        error: std::io::Error,
    },
    /// The folder has no safetensors weights.
    #[error("{dir}: no model.safetensors and no model.safetensors.index.json{hint}")]
    NoWeights {
        /// Path of the folder.
        dir: PathBuf,
        /// Other weights that were found.
        hint: &'static str,
    },
    /// A weight file is inconsistent.
    #[error("{path}: {fault}")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Fault in the file.
        fault: FileFault,
    },
    /// A tensor contradicts its file, the index or the configuration.
    #[error("{path}: tensor `{tensor}`: {fault}")]
    Tensor {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Fault of the tensor.
        fault: TensorFault,
    },
    /// Stored tensors are unused, or weights are missing.
    #[error("{dir}: weights do not match the configuration: {}", coverage(missing, unexpected))]
    Coverage {
        /// Path of the folder.
        dir: PathBuf,
        /// Weights that the configuration requires.
        missing: Vec<String>,
        /// Stored tensors that no weight uses.
        unexpected: Vec<String>,
    },
    /// The expert placement is invalid.
    #[error(transparent)]
    Placement(#[from] crate::PlacementError),
    /// The checkpoint is a draft model, which cannot be served alone.
    #[error("{dir}: LlamaForCausalLMEagle3 is a draft model and cannot be served alone")]
    DraftModelOnly {
        /// Path of the folder.
        dir: PathBuf,
    },
    /// A weight does not split evenly over the ranks.
    #[error("tensor `{tensor}`: {error}")]
    Split {
        /// Name of the tensor.
        tensor: String,
        /// Count and numbers of ranks.
        error: UnevenSplit,
    },
    /// A model reads a weight that the weight table does not have, or leaves one unread: a bug.
    #[error("weight `{tensor}` {what}: the model and the weight table disagree")]
    Table {
        /// Name of the weight.
        tensor: String,
        /// Kind of the disagreement.
        what: &'static str,
    },
    /// The device rejected an operation.
    #[error("weight `{tensor}`: {error}")]
    Device {
        /// Weight that was being loaded.
        tensor: String,
        /// Error of the device.
        error: ops::OpError,
    },
}

/// Fault of a whole safetensors file or index.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FileFault {
    /// The file is shorter than a header length.
    #[error("{bytes} bytes are too short for a safetensors file")]
    Short {
        /// Size of the file in bytes.
        bytes: usize,
    },
    /// The header exceeds the file or the limit of the format.
    #[error("the header length is {stated} bytes, but the limit is {limit}")]
    HeaderLength {
        /// Header length that the file states, in bytes.
        stated: u64,
        /// Largest length that the size of the file and the format allow, in bytes.
        limit: u64,
    },
    /// The header is not valid JSON of the format.
    #[error("invalid header: {detail}")]
    Header {
        /// Position and reason of the parse error.
        detail: String,
    },
    /// The data is longer or shorter than its tensors.
    #[error("tensors end at byte {end} of the data, but there are {bytes}")]
    End {
        /// End of the last tensor, as an offset in the data.
        end: u64,
        /// Size of the data after the header, in bytes.
        bytes: u64,
    },
    /// The index is not valid JSON of the format.
    #[error("invalid index: {detail}")]
    Index {
        /// Position and reason of the parse error.
        detail: String,
    },
    /// A file name in the index is not a plain name inside the folder.
    #[error("`{name}` is not the name of a file in this folder")]
    Outside {
        /// File name.
        name: String,
    },
}

/// Fault of one tensor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TensorFault {
    /// The dtype is not a dtype of the format.
    #[error("dtype `{0}` is unknown")]
    UnknownDType(String),
    /// The dtype is not supported for weights.
    #[error("dtype {0} is not supported for weights; F32, BF16 and F16 are")]
    WrongDType(&'static str),
    /// Offsets are in the wrong order or beyond the data.
    #[error("bytes [{start}, {end}) are outside of the {bytes} bytes of data")]
    Offsets {
        /// Offset of the first byte.
        start: u64,
        /// Offset after the last byte.
        end: u64,
        /// Size of the data in bytes.
        bytes: u64,
    },
    /// Offsets leave a gap after the previous tensor, or overlap it.
    #[error("starts at byte {start} of the data, but the tensor before it ends at {expected}")]
    Gap {
        /// Offset of the first byte.
        start: u64,
        /// Expected offset of the first byte.
        expected: u64,
    },
    /// The size of the shape differs from the number of bytes.
    #[error("shape {shape:?} of {dtype} does not match {bytes} bytes")]
    Size {
        /// Stated shape.
        shape: Vec<u64>,
        /// Stated dtype.
        dtype: &'static str,
        /// Number of bytes between the offsets.
        bytes: u64,
    },
    /// The target id of a draft id is outside of the vocabulary.
    #[error("target id {draft} {offset:+} of draft id {draft} is outside of the {ids} target ids")]
    Offset {
        /// Draft id.
        draft: usize,
        /// Offset from draft id to target id.
        offset: i64,
        /// Size of the target vocabulary.
        ids: usize,
    },
    /// The dtype is not supported for offsets from draft ids to target ids.
    #[error("dtype {0} is not supported for draft id offsets; I64 is")]
    OffsetDType(&'static str),
    /// The scale is not a finite number above 0.
    #[error("scale {0} is not a finite number above 0")]
    Scale(String),
    /// The shape differs from that of the configuration.
    #[error("shape {found:?}, but the configuration requires {expected:?}")]
    Shape {
        /// Stored shape.
        found: Vec<u64>,
        /// Shape from the configuration.
        expected: Vec<u64>,
    },
    /// The name is stored in two files.
    #[error("is also stored in {other}")]
    Duplicate {
        /// Path of the other file.
        other: String,
    },
    /// The index contains a tensor that its file does not contain.
    #[error("is in the index but not in the file")]
    NotInFile,
    /// A file contains a tensor that the index does not assign to it.
    #[error("is in the file, but the index {0}")]
    NotInIndex(String),
    /// Experts are stored both separately and fused.
    #[error("contains the weight `{0}`, which is also stored separately")]
    StoredTwice(String),
    /// The copy of a weight in an MTP module differs from the original.
    #[error("differs from `{0}`, of which it must be a copy")]
    Copy(&'static str),
    /// The stored LM head differs from the embedding that it is tied to.
    #[error("differs from the embedding, but tie_word_embeddings is true")]
    TiedHead,
}

/// Formats both lists, truncated to fit a terminal.
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
