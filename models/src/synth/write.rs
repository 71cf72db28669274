//! Writes a synthetic checkpoint: what `from_pretrained` and the loader here read alike.

use super::tokenizer::Family;
use super::values::Generator;
use crate::table::{TensorSpec, tensors};
use crate::{Config, ConfigError};
use half::bf16;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Element type of a written checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SynthDType {
    /// `F32`
    F32,
    /// `BF16`; the values are the same, as they are exact in both.
    BF16,
}

/// How to write.
#[derive(Debug, Clone, Copy)]
pub struct SynthOptions {
    /// Changes every value.
    pub seed: u64,
    /// Element type.
    pub dtype: SynthDType,
    /// Files are cut before a tensor would pass this size; a single file has no index.
    pub shard_bytes: u64,
}

/// Files of published checkpoints are about this large.
const SHARD_BYTES: u64 = 5_000_000_000;

impl Default for SynthOptions {
    fn default() -> Self {
        Self { seed: 0, dtype: SynthDType::BF16, shard_bytes: SHARD_BYTES }
    }
}

/// Why a synthetic checkpoint cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file cannot be written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// There is no id for every byte and special token.
    #[error(
        "{path}: field `vocab_size`: {found} ids cannot hold a byte-level tokenizer; it needs {least}"
    )]
    Vocabulary {
        /// The configuration.
        path: PathBuf,
        /// Its vocabulary.
        found: usize,
        /// The smallest that works.
        least: usize,
    },
}

/// Writes config, weights, tokenizer, chat template and generation config for `config_path` to the
/// folder `out`, which is made if it is missing. `progress` hears bytes written and bytes in all.
pub fn write(
    config_path: &Path,
    out: &Path,
    options: &SynthOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), SynthError> {
    let config = Config::from_file(config_path)?;
    let family = Family::of(config.architecture);
    if config.vocab < family.least_vocab() {
        let (path, least) = (config_path.to_owned(), family.least_vocab());
        return Err(SynthError::Vocabulary { path, found: config.vocab, least });
    }
    at(out, fs::create_dir_all(out))?;
    let text = at(config_path, fs::read(config_path))?;
    let path = out.join("config.json");
    at(&path, fs::write(&path, text))?;
    write_json(&out.join("tokenizer.json"), &family.tokenizer(&config))?;
    write_json(&out.join("tokenizer_config.json"), &family.tokenizer_config(&config))?;
    write_json(&out.join("generation_config.json"), &family.generation_config())?;
    write_weights(&tensors(&config), out, options, progress)
}

fn write_weights(
    specs: &[TensorSpec],
    out: &Path,
    options: &SynthOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), SynthError> {
    let files = cut(specs, options);
    let total: u64 = specs.iter().map(|s| bytes(s, options.dtype)).sum();
    let mut done = 0;
    let mut weight_map = serde_json::Map::new();
    for (i, specs) in files.iter().enumerate() {
        let name = match files.len() {
            1 => "model.safetensors".to_owned(),
            n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        };
        weight_map.extend(specs.iter().map(|s| (s.name.clone(), json!(name))));
        let path = out.join(name);
        let mut file = BufWriter::with_capacity(1 << 20, at(&path, File::create(&path))?);
        at(&path, write_header(&mut file, specs, options.dtype))?;
        for spec in *specs {
            at(&path, write_values(&mut file, spec, options))?;
            done += bytes(spec, options.dtype);
            progress(done, total);
        }
        at(&path, file.flush())?;
    }
    if files.len() == 1 {
        return Ok(());
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    write_json(&out.join("model.safetensors.index.json"), &index)
}

/// Consecutive tensors per file.
fn cut<'a>(specs: &'a [TensorSpec], options: &SynthOptions) -> Vec<&'a [TensorSpec]> {
    let mut files = Vec::new();
    let (mut start, mut size) = (0, 0);
    for (i, spec) in specs.iter().enumerate() {
        let next = bytes(spec, options.dtype);
        if i > start && size + next > options.shard_bytes {
            files.push(&specs[start..i]);
            (start, size) = (i, 0);
        }
        size += next;
    }
    files.push(&specs[start..]);
    files
}

fn bytes(spec: &TensorSpec, dtype: SynthDType) -> u64 {
    let element = match dtype {
        SynthDType::F32 => 4,
        SynthDType::BF16 => 2,
    };
    spec.elements() as u64 * element
}

fn write_header(to: &mut impl Write, specs: &[TensorSpec], dtype: SynthDType) -> io::Result<()> {
    let name = match dtype {
        SynthDType::F32 => "F32",
        SynthDType::BF16 => "BF16",
    };
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut start = 0;
    for spec in specs {
        let end = start + bytes(spec, dtype);
        let entry = json!({"dtype": name, "shape": spec.shape, "data_offsets": [start, end]});
        header.insert(spec.name.clone(), entry);
        start = end;
    }
    let mut text = serde_json::to_string(&header)?;
    text += &" ".repeat(text.len().next_multiple_of(8) - text.len()); // Keeps the data aligned.
    to.write_all(&(text.len() as u64).to_le_bytes())?;
    to.write_all(text.as_bytes())
}

fn write_values(to: &mut impl Write, spec: &TensorSpec, options: &SynthOptions) -> io::Result<()> {
    let [_, inputs] = spec.matrix();
    let generator = Generator::new(&spec.name, options.seed, spec.values, inputs);
    for i in 0..spec.elements() as u64 {
        let value = generator.value(i);
        match options.dtype {
            SynthDType::F32 => to.write_all(&value.to_le_bytes())?,
            SynthDType::BF16 => to.write_all(&bf16::from_f32(value).to_le_bytes())?,
        }
    }
    Ok(())
}

fn write_json(path: &Path, value: &Value) -> Result<(), SynthError> {
    at(path, fs::write(path, format!("{value:#}\n")))
}

fn at<T>(path: &Path, result: io::Result<T>) -> Result<T, SynthError> {
    result.map_err(|source| SynthError::Io { path: path.to_owned(), source })
}
