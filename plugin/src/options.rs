//! Options with which a foreign host opens a model.

use std::path::PathBuf;

use models::LoadFormat;
use ops::DType;
use serde::Deserialize;

use crate::PluginError;

/// Options of `hadron_open`, a JSON object. `include/hadron.h` describes the fields.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PluginOptions {
    /// Folder with `config.json` and safetensors files.
    pub model_dir: PathBuf,
    /// Kind of the device.
    pub device: DeviceOption,
    /// Index among the visible GPUs.
    #[serde(default)]
    pub device_index: usize,
    /// Type of weights and activations.
    pub dtype: DtypeOption,
    /// Type of the KV cache.
    #[serde(default)]
    pub kv_cache_dtype: KvDtypeOption,
    /// Source of the weights.
    #[serde(default)]
    pub load_format: LoadFormatOption,
    /// Seed of synthetic weights.
    #[serde(default)]
    pub seed: u64,
    /// Longest context, in tokens.
    pub max_model_len: usize,
    /// Most tokens of a step.
    pub max_num_tokens: usize,
    /// Most rows of a step.
    pub max_num_rows: usize,
    /// Tokens of a block of the KV cache.
    #[serde(default = "default_block_tokens")]
    pub block_tokens: usize,
    /// Row counts of the steps that the host captures as graphs.
    #[serde(default)]
    pub capture_rows: Vec<usize>,
    /// Threads of a CPU, or threads that prepare weights for a GPU; `None` = all cores, of which each rank on a CPU gets a share.
    #[serde(default)]
    pub threads: Option<usize>,
    /// Folder of compiled GPU kernels; `None` = kernels are compiled at every start.
    #[serde(default)]
    pub kernel_cache: Option<PathBuf>,
    /// Folders in which the libraries of the GPU are searched first.
    #[serde(default)]
    pub library_folders: Vec<PathBuf>,
    /// Paths that replace the search for the libraries of the GPU.
    #[serde(default)]
    pub libraries: Option<LibraryPaths>,
}

/// Tokens of a block unless the host states another number.
fn default_block_tokens() -> usize {
    16
}

/// Kind of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceOption {
    /// The host processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
    /// An AMD GPU.
    Rocm,
}

/// Type of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DtypeOption {
    /// 32-bit floats.
    Float32,
    /// bfloat16.
    Bfloat16,
    /// IEEE binary16.
    Float16,
}

/// Type of the KV cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtypeOption {
    /// The type of the activations.
    #[default]
    Auto,
    /// OCP E4M3.
    Fp8,
}

/// Source of the weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LoadFormatOption {
    /// Files of the model folder.
    #[default]
    Safetensors,
    /// Values that are computed from the seed.
    Synth,
}

/// Paths of the libraries of a GPU, which replace the search.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LibraryPaths {
    /// Driver.
    pub driver: PathBuf,
    /// Run-time compiler; `None` = the driver has it.
    #[serde(default)]
    pub compiler: Option<PathBuf>,
    /// BLASLt library; `None` = the device has none.
    #[serde(default)]
    pub blas: Option<PathBuf>,
    /// RCCL or NCCL; `None` = the device has none.
    #[serde(default)]
    pub collectives: Option<PathBuf>,
    /// Lanes per warp, if the libraries are the emulator.
    #[serde(default)]
    pub emulated_warp_size: Option<u32>,
}

impl PluginOptions {
    /// Parses and checks options.
    ///
    /// Errors: the error names the field.
    pub fn parse(json: &str) -> Result<Self, PluginError> {
        let options: Self = serde_json::from_str(json)?;
        let Self { max_model_len, max_num_tokens, max_num_rows, block_tokens, .. } = &options;
        for (field, &value) in [
            ("max_model_len", max_model_len),
            ("max_num_tokens", max_num_tokens),
            ("max_num_rows", max_num_rows),
            ("block_tokens", block_tokens),
        ] {
            if value == 0 || value > i32::MAX as usize {
                let expected = "a number from 1 to 2,147,483,647";
                return Err(PluginError::Option { field, got: value as u64, expected });
            }
        }
        let outside = |&&rows: &&usize| rows == 0 || rows > *max_num_rows;
        if let Some(&rows) = options.capture_rows.iter().find(outside) {
            let (field, expected) = ("capture_rows", "numbers from 1 to max_num_rows");
            return Err(PluginError::Option { field, got: rows as u64, expected });
        }
        Ok(options)
    }

    /// Type of weights and activations.
    pub(crate) fn dtype(&self) -> DType {
        match self.dtype {
            DtypeOption::Float32 => DType::F32,
            DtypeOption::Bfloat16 => DType::BF16,
            DtypeOption::Float16 => DType::F16,
        }
    }

    /// Type of the KV cache.
    pub(crate) fn kv_dtype(&self) -> DType {
        match self.kv_cache_dtype {
            KvDtypeOption::Auto => self.dtype(),
            KvDtypeOption::Fp8 => DType::F8E4M3,
        }
    }

    /// Source of the weights.
    pub(crate) fn format(&self) -> LoadFormat {
        match self.load_format {
            LoadFormatOption::Safetensors => LoadFormat::Safetensors,
            LoadFormatOption::Synth => LoadFormat::Synth { seed: self.seed },
        }
    }
}
