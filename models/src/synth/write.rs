//! Writer of synthetic checkpoints. Hadron and the `from_pretrained` function of transformers can load these
//! checkpoints.

use super::synth_tensor::{SynthTensor, all_tensors};
use super::tokenizer::SynthTokenizerSpec;
use crate::config::CheckpointDType;
use crate::{ModelConfig, ModelConfigError};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Dtype of the weights in a written checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SynthDType {
    /// Weights are written as `F32`.
    F32,
    /// Weights are written as `BF16`. All values are exact in F32, BF16 and F16, so that the dtype does not
    /// change the values.
    BF16,
    /// Weights are written as `F16`.
    F16,
}

impl SynthDType {
    /// Name of the dtype in `config.json`.
    fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::BF16 => "bfloat16",
            Self::F16 => "float16",
        }
    }
}

/// Options for writing a synthetic checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct SynthOptions {
    /// Seed from which all weight values are computed.
    pub seed: u64,
    /// Dtype of the weights that are not quantised.
    pub dtype: SynthDType,
    /// Maximum size of a weight file in bytes; a larger tensor is written to a separate file. A checkpoint
    /// with a single file has no index.
    pub shard_bytes: u64,
}

/// Default maximum size of a weight file in bytes, as in published checkpoints.
const SHARD_BYTES: u64 = 5_000_000_000;

impl Default for SynthOptions {
    fn default() -> Self {
        Self { seed: 0, dtype: SynthDType::BF16, shard_bytes: SHARD_BYTES }
    }
}

/// Error while a synthetic checkpoint is written.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// The configuration file is invalid.
    #[error(transparent)]
    Config(#[from] ModelConfigError),
    /// A file of the checkpoint cannot be written.
    #[error("{path}: {error}")]
    Io {
        /// Path of the file that cannot be written.
        path: PathBuf,
        /// Error of the operating system.
        error: io::Error,
    },
    /// The vocabulary of the configuration is too small for all bytes and special tokens.
    #[error(
        "{path}: field `vocab_size`: {found} ids are too few for a byte-level tokenizer; it needs {required}"
    )]
    Vocabulary {
        /// Path of the configuration file.
        path: PathBuf,
        /// Vocabulary size in the configuration file.
        found: usize,
        /// Smallest vocabulary size with ids for all bytes and special tokens.
        required: usize,
    },
}

/// Writes a checkpoint with the configuration file `config_path` to the folder `out`: configuration, weights,
/// tokenizer, chat template and generation configuration. The folder is created if it does not exist.
/// `progress` is called with the number of bytes written so far and the total number of bytes.
pub fn write(
    config_path: &Path,
    out: &Path,
    options: &SynthOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), SynthError> {
    let mut config = ModelConfig::from_file(config_path)?;
    config.load_mtp = config.mtp_layers > 0;
    if config.eagle.is_some() {
        // A draft model uses the tokenizer of its target model, so no tokenizer is written.
        io_error(out, fs::create_dir_all(out))?;
        write_config(config_path, &config, out, options.dtype)?;
        return write_weights(&all_tensors(&config, options), out, options, progress);
    }
    let family = SynthTokenizerSpec::of(config.architecture);
    if config.vocab < family.min_vocab() {
        let (path, required) = (config_path.to_owned(), family.min_vocab());
        return Err(SynthError::Vocabulary { path, found: config.vocab, required });
    }
    io_error(out, fs::create_dir_all(out))?;
    write_config(config_path, &config, out, options.dtype)?;
    write_json(&out.join("tokenizer.json"), &family.tokenizer(&config))?;
    write_json(&out.join("tokenizer_config.json"), &family.tokenizer_config(&config))?;
    write_json(&out.join("generation_config.json"), &family.generation_config())?;
    write_weights(&all_tensors(&config, options), out, options, progress)
}

/// Writes the configuration unchanged unless exactly one of the declared dtype and the dtype of the written
/// weights is float16. In that case the declared dtype is replaced by the dtype of the weights, because a
/// declared float16 selects float16 for the computation.
fn write_config(
    from: &Path,
    config: &ModelConfig,
    out: &Path,
    dtype: SynthDType,
) -> Result<(), SynthError> {
    let text = io_error(from, fs::read(from))?;
    let path = out.join("config.json");
    let (declares_f16, stores_f16) =
        (config.dtype == Some(CheckpointDType::F16), dtype == SynthDType::F16);
    if declares_f16 == stores_f16 {
        return io_error(&path, fs::write(&path, text));
    }
    let mut json: Value = io_error(from, serde_json::from_slice(&text).map_err(io::Error::from))?;
    if let Some(members) = json.as_object_mut() {
        let field = if members.contains_key("dtype") { "dtype" } else { "torch_dtype" };
        members.insert(field.to_owned(), dtype.name().into());
    }
    write_json(&path, &json)
}

/// Writes the tensors to weight files of up to `options.shard_bytes` bytes, and their index if there are
/// several files.
fn write_weights(
    tensors: &[SynthTensor],
    out: &Path,
    options: &SynthOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), SynthError> {
    let files = shard_tensors(tensors, options.shard_bytes);
    let total: u64 = tensors.iter().map(SynthTensor::bytes).sum();
    let mut done = 0;
    let mut weight_map = serde_json::Map::new();
    for (i, tensors) in files.iter().enumerate() {
        let name = match files.len() {
            1 => "model.safetensors".to_owned(),
            n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        };
        weight_map.extend(tensors.iter().map(|t| (t.name.clone(), json!(name))));
        write_weight_file(&out.join(name), tensors, |bytes| {
            done += bytes;
            progress(done, total);
        })?;
    }
    if files.len() == 1 {
        return Ok(());
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    write_json(&out.join("model.safetensors.index.json"), &index)
}

/// Writes one weight file. After each tensor, `on_written` is called with the size of the tensor in bytes.
fn write_weight_file(
    path: &Path,
    tensors: &[SynthTensor],
    mut on_written: impl FnMut(u64),
) -> Result<(), SynthError> {
    let mut file = BufWriter::with_capacity(1 << 20, io_error(path, File::create(path))?);
    io_error(path, write_header(&mut file, tensors))?;
    for tensor in tensors {
        io_error(path, tensor.write(&mut file))?;
        on_written(tensor.bytes());
    }
    io_error(path, file.flush())
}

/// Splits the tensors into consecutive groups, one per weight file.
fn shard_tensors(tensors: &[SynthTensor], shard_bytes: u64) -> Vec<&[SynthTensor]> {
    let mut files = Vec::new();
    let (mut start, mut size) = (0, 0);
    for (i, tensor) in tensors.iter().enumerate() {
        let next = tensor.bytes();
        if i > start && size + next > shard_bytes {
            files.push(&tensors[start..i]);
            (start, size) = (i, 0);
        }
        size += next;
    }
    files.push(&tensors[start..]);
    files
}

fn write_header(to: &mut impl Write, tensors: &[SynthTensor]) -> io::Result<()> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.bytes();
        let (dtype, shape) = (tensor.dtype(), &tensor.shape);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        header.insert(tensor.name.clone(), entry);
        start = end;
    }
    let mut text = serde_json::to_string(&header)?;
    text += &" ".repeat(text.len().next_multiple_of(8) - text.len()); // Spaces align the data to 8 bytes.
    to.write_all(&(text.len() as u64).to_le_bytes())?;
    to.write_all(text.as_bytes())
}

fn write_json(path: &Path, value: &Value) -> Result<(), SynthError> {
    io_error(path, fs::write(path, format!("{value:#}\n")))
}

fn io_error<T>(path: &Path, result: io::Result<T>) -> Result<T, SynthError> {
    result.map_err(|error| SynthError::Io { path: path.to_owned(), error })
}
