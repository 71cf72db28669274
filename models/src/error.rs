//! Why a model cannot be loaded. Every variant names what the user has to look at.

use crate::ModelConfigError;
use crate::sharding::UnevenSplit;
use std::path::PathBuf;

/// A checkpoint that cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ModelLoadError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ModelConfigError),
    /// A file cannot be read.
    #[error("{path}: {error}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// There is nothing to load.
    #[error("{dir}: no model.safetensors and no model.safetensors.index.json{hint}")]
    NoWeights {
        /// The folder.
        dir: PathBuf,
        /// What is there instead.
        hint: &'static str,
    },
    /// A weight file whose bytes contradict themselves.
    #[error("{path}: {fault}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        fault: FileFault,
    },
    /// A tensor that contradicts its file, the index or the configuration.
    #[error("{path}: tensor `{tensor}`: {fault}")]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        fault: TensorFault,
    },
    /// Stored tensors nobody reads, or weights nobody stores.
    #[error("{dir}: weights do not match the configuration: {}", coverage(missing, left_over))]
    Coverage {
        /// The folder.
        dir: PathBuf,
        /// Weights that the configuration asks for.
        missing: Vec<String>,
        /// Tensors that no weight consumes.
        left_over: Vec<String>,
    },
    /// Experts cannot lie where they should.
    #[error(transparent)]
    Placement(#[from] crate::PlacementError),
    /// There is no model in it.
    #[error("{dir}: LlamaForCausalLMEagle3 drafts for another model and says nothing itself")]
    DraftModelOnly {
        /// The folder.
        dir: PathBuf,
    },
    /// A weight that does not split evenly.
    #[error("tensor `{tensor}`: {error}")]
    Split {
        /// The tensor.
        tensor: String,
        /// The numbers.
        error: UnevenSplit,
    },
    /// A model asked for a weight that its table does not have, or left one unread.
    #[error("weight `{tensor}` {what}: the model and its table disagree")]
    Table {
        /// The weight.
        tensor: String,
        /// How they disagree.
        what: &'static str,
    },
    /// The device refused.
    #[error("weight `{tensor}`: {error}")]
    Device {
        /// The weight being placed.
        tensor: String,
        /// What it said.
        error: ops::OpError,
    },
}

/// What can be wrong with a safetensors file, or an index, as a whole.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FileFault {
    /// Not even a header length.
    #[error("{bytes} bytes are too short for a safetensors file")]
    Short {
        /// Size of the file.
        bytes: usize,
    },
    /// The header would reach beyond the file or the limit.
    #[error("the header is said to have {stated} bytes, but at most {limit} can be")]
    HeaderLength {
        /// What the file says.
        stated: u64,
        /// What the file's size and the format allow.
        limit: u64,
    },
    /// The header is not the JSON it should be.
    #[error("the header is broken: {detail}")]
    Header {
        /// Where parsing stopped.
        detail: String,
    },
    /// Bytes behind the last tensor, or missing ones.
    #[error("tensors end at byte {end} of the data, but there are {bytes}")]
    End {
        /// Where the last tensor ends.
        end: u64,
        /// Bytes behind the header.
        bytes: u64,
    },
    /// The index is not the JSON it should be.
    #[error("the index is broken: {detail}")]
    Index {
        /// What is wrong.
        detail: String,
    },
    /// A file name in the index that could leave the folder.
    #[error("`{name}` is not the name of a file in this folder")]
    Outside {
        /// The name.
        name: String,
    },
}

/// What can be wrong with one tensor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TensorFault {
    /// A dtype that is no dtype of the format.
    #[error("dtype `{0}` is unknown")]
    UnknownDType(String),
    /// A dtype that weights cannot have here.
    #[error("dtype {0} is not supported for weights; F32, BF16 and F16 are")]
    WrongDType(&'static str),
    /// Offsets that run backwards or beyond the data.
    #[error("bytes [{start}, {end}) do not lie in the {bytes} bytes of data")]
    Offsets {
        /// First byte.
        start: u64,
        /// Byte behind the last.
        end: u64,
        /// Bytes of data.
        bytes: u64,
    },
    /// Offsets that leave a hole or reach into the tensor before.
    #[error("starts at byte {start} of the data, but the tensor before it ends at {expected}")]
    Gap {
        /// First byte.
        start: u64,
        /// Where it must start.
        expected: u64,
    },
    /// A shape whose size is not that of the bytes.
    #[error("shape {shape:?} of {dtype} does not have {bytes} bytes")]
    Size {
        /// Stated shape.
        shape: Vec<u64>,
        /// Stated dtype.
        dtype: &'static str,
        /// Bytes between the offsets.
        bytes: u64,
    },
    /// A draft that stands for no id of the vocabulary.
    #[error("{draft} {offset:+} is none of {ids} ids")]
    Offset {
        /// Its number.
        draft: usize,
        /// What is added to it.
        offset: i64,
        /// Ids of the vocabulary.
        ids: usize,
    },
    /// A type of what is no weight.
    #[error("dtype {0} is not supported for offsets of ids; I64 is")]
    OffsetDType(&'static str),
    /// A factor that values cannot be divided by.
    #[error("{0} is no scale: a finite number above 0 is")]
    Scale(String),
    /// A shape that the configuration rules out.
    #[error("shape {found:?}, but the configuration says {expected:?}")]
    Shape {
        /// Stored shape.
        found: Vec<u64>,
        /// Shape from the configuration.
        expected: Vec<u64>,
    },
    /// A name that is stored twice.
    #[error("is also stored in {other}")]
    Duplicate {
        /// The other file.
        other: String,
    },
    /// The index names a tensor that its file does not hold.
    #[error("is in the index but not in the file")]
    NotInFile,
    /// A file holds a tensor that the index does not place there.
    #[error("is in the file, but the index {0}")]
    NotInIndex(String),
    /// Both the separate and the fused form are stored.
    #[error("holds what `{0}` stores again")]
    StoredTwice(String),
    /// What draft layers store again, and is not the same.
    #[error("differs from `{0}`, which it has to repeat")]
    Copy(&'static str),
    /// A tied head that is not the embedding.
    #[error("differs from the embedding, but tie_word_embeddings is true")]
    TiedHead,
}

/// Both lists, cut to what a terminal can show.
fn coverage(missing: &[String], left_over: &[String]) -> String {
    const SHOWN: usize = 16;
    let list = |title: &str, names: &[String]| {
        let mut text = format!("{} {title}", names.len());
        for (i, name) in names.iter().take(SHOWN).enumerate() {
            text += if i == 0 { ": " } else { ", " };
            text += name;
        }
        if names.len() > SHOWN { text + ", ..." } else { text }
    };
    format!("{}; {}", list("missing", missing), list("left over", left_over))
}
