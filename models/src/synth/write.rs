//! Writer of synthetic checkpoints, which this crate and `from_pretrained` of transformers can read.

use super::tokenizer::SynthTokenizer;
use super::values::{SynthDistribution, SynthDraftVocab, SynthValueGenerator};
use crate::config::CheckpointDType;
use crate::weight_table::{TensorSpec, mtp_copies, tensors};
use crate::{ModelConfig, ModelConfigError};
use half::{bf16, f16};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Dtype of the weights in a written checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SynthDType {
    /// `F32`
    F32,
    /// `BF16`; all values are exact in F32, BF16 and F16, so the dtype does not change them.
    BF16,
    /// `F16`
    F16,
}

impl SynthDType {
    /// Name in `config.json`.
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
    /// Seed of all values.
    pub seed: u64,
    /// Dtype of weights that are not quantised in the configuration.
    pub dtype: SynthDType,
    /// Maximum size of a weight file in bytes; a larger tensor gets a file of its own. A checkpoint with a
    /// single file has no index.
    pub shard_bytes: u64,
}

/// Tensor with one flag per target token id: whether it is the target of a draft token id. EAGLE-3
/// checkpoints store it in addition to the offsets `d2t`; Hadron does not load it.
const TARGET_TO_DRAFT: &str = "t2d";
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
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ModelConfigError),
    /// A file cannot be written.
    #[error("{path}: {error}")]
    Io {
        /// Path of the file.
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
        /// Vocabulary size in the configuration.
        found: usize,
        /// Smallest vocabulary size that is supported.
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
    let family = SynthTokenizer::of(config.architecture);
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

/// Writes the configuration unchanged, unless only one of the declared and the stored dtype is float16. In
/// that case the declared dtype is replaced, because a declared float16 selects float16 for the computation.
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

/// Tensor of a synthetic checkpoint that is written to a weight file.
struct SynthTensor {
    name: String,
    shape: Vec<usize>,
    element: SynthElementType,
    generator: SynthValueGenerator,
}

/// Type and encoding of the elements of a written tensor.
#[derive(Clone, Copy)]
enum SynthElementType {
    F32,
    BF16,
    F16,
    E4m3,
    /// I64 offsets from draft token ids to target token ids.
    Offsets(SynthDraftVocab),
    /// Flag per target token id: whether it is the target of a draft token id.
    DraftableFlags(SynthDraftVocab),
}

/// All tensors that a checkpoint stores, including the copies in MTP modules.
fn all_tensors(config: &ModelConfig, options: &SynthOptions) -> Vec<SynthTensor> {
    let mut specs = tensors(config);
    specs.retain(|spec| !spec.optional);
    let flags = specs.iter().find(|spec| spec.values == SynthDistribution::Offsets).map(|spec| {
        let draft_vocab = SynthDraftVocab { draft_ids: spec.elements(), target_ids: config.vocab };
        let element = SynthElementType::DraftableFlags(draft_vocab);
        let generator =
            SynthValueGenerator::new(TARGET_TO_DRAFT, options.seed, SynthDistribution::Offsets, 1);
        SynthTensor {
            name: TARGET_TO_DRAFT.to_owned(),
            shape: vec![config.vocab],
            element,
            generator,
        }
    });
    let copy = |(copy, of): (String, &str)| {
        let spec = specs.iter().find(|spec| spec.name == of)?;
        let weight = stored(spec, options, config.vocab).pop();
        weight.map(|weight| SynthTensor { name: copy, ..weight })
    };
    let copies = mtp_copies(config).into_iter().filter_map(copy);
    let weights = specs.iter().flat_map(|spec| stored(spec, options, config.vocab));
    weights.chain(copies).chain(flags).collect()
}

/// Tensors that are stored for a weight: the weight, and its scales if it is quantised.
fn stored(spec: &TensorSpec, options: &SynthOptions, vocab: usize) -> Vec<SynthTensor> {
    let [_, inputs] = spec.matrix();
    let tensor = |name: &str, shape, element, values| SynthTensor {
        generator: SynthValueGenerator::new(name, options.seed, values, inputs),
        name: name.to_owned(),
        shape,
        element,
    };
    if let Some(scales) = spec.quantized() {
        let shape = spec.scale_shape(scales.grid).to_vec();
        return vec![
            tensor(&spec.name, spec.shape.clone(), SynthElementType::E4m3, spec.values),
            tensor(&scales.name, shape, SynthElementType::F32, SynthDistribution::Scale),
        ];
    }
    let element = match options.dtype {
        _ if spec.values == SynthDistribution::Offsets => {
            SynthElementType::Offsets(SynthDraftVocab {
                draft_ids: spec.elements(),
                target_ids: vocab,
            })
        }
        SynthDType::F32 => SynthElementType::F32,
        SynthDType::BF16 => SynthElementType::BF16,
        SynthDType::F16 => SynthElementType::F16,
    };
    vec![tensor(&spec.name, spec.shape.clone(), element, spec.values)]
}

impl SynthTensor {
    fn elements(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64
    }

    fn bytes(&self) -> u64 {
        self.elements()
            * match self.element {
                SynthElementType::Offsets(_) => 8,
                SynthElementType::F32 => 4,
                SynthElementType::BF16 | SynthElementType::F16 => 2,
                SynthElementType::E4m3 | SynthElementType::DraftableFlags(_) => 1,
            }
    }

    fn dtype(&self) -> &'static str {
        match self.element {
            SynthElementType::F32 => "F32",
            SynthElementType::BF16 => "BF16",
            SynthElementType::F16 => "F16",
            SynthElementType::E4m3 => "F8_E4M3",
            SynthElementType::Offsets(_) => "I64",
            SynthElementType::DraftableFlags(_) => "BOOL",
        }
    }

    fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let values = &self.generator;
        for i in 0..self.elements() {
            match self.element {
                SynthElementType::F32 => to.write_all(&values.value(i).to_le_bytes())?,
                SynthElementType::BF16 => {
                    to.write_all(&bf16::from_f32(values.value(i)).to_le_bytes())?;
                }
                SynthElementType::F16 => {
                    to.write_all(&f16::from_f32(values.value(i)).to_le_bytes())?
                }
                SynthElementType::E4m3 => to.write_all(&[values.e4m3(i)])?,
                SynthElementType::Offsets(draft_vocab) => {
                    to.write_all(&draft_vocab.offset(i).to_le_bytes())?;
                }
                SynthElementType::DraftableFlags(draft_vocab) => {
                    to.write_all(&[draft_vocab.contains(i).into()])?;
                }
            }
        }
        Ok(())
    }
}

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
        let path = out.join(name);
        let mut file = BufWriter::with_capacity(1 << 20, io_error(&path, File::create(&path))?);
        io_error(&path, write_header(&mut file, tensors))?;
        for tensor in *tensors {
            io_error(&path, tensor.write(&mut file))?;
            done += tensor.bytes();
            progress(done, total);
        }
        io_error(&path, file.flush())?;
    }
    if files.len() == 1 {
        return Ok(());
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    write_json(&out.join("model.safetensors.index.json"), &index)
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
