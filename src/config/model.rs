//! Flags that select the model and its files.

use clap::{Args, ValueEnum};
use serde_json::{Map, Value};

use super::units::{MaxModelLenArg, json_object};
use super::{CommandLineError, rejected};

/// Flags that select the model, the tokenizer and the format of the weights.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Model folder or hub id [default: the embedded demo model]
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// Alternative to the positional MODEL
    #[arg(long = "model", alias = "model-path", value_name = "MODEL")]
    model_flag: Option<String>,
    /// Branch, tag or commit of the hub repository
    #[arg(long)]
    pub revision: Option<String>,
    /// Tokenizer folder or hub id, if it differs from the model's
    #[arg(long)]
    pub tokenizer: Option<String>,
    /// Model names accepted by the API, and patterns such as `claude-*` or `*` that accept every matching name.
    /// Responses repeat the name of the request; without one, they report the first name that is no pattern.
    /// Consumes all arguments after it, so put MODEL before it
    #[arg(long, num_args = 1.., value_name = "NAME")]
    pub served_model_name: Vec<String>,
    /// Values that override members of config.json; objects are merged, and null sets a member to null. A name with dots
    /// is a path, also as a flag: --hf-overrides.rope_scaling.factor 4
    #[arg(long, value_parser = json_object, value_name = "JSON")]
    hf_overrides: Vec<Map<String, Value>>,
    /// Data type of weights and activations; auto selects that of config.json
    #[arg(long, default_value = "auto")]
    pub dtype: DtypeArg,
    /// Weights format; synth generates random weights from config.json
    #[arg(long, default_value = "auto")]
    pub load_format: LoadFormatArg,
    /// Maximum tokens of prompt plus output; auto = that of config.json, or less if the KV cache is smaller
    #[arg(
        long,
        alias = "context-length",
        default_value = "auto",
        allow_hyphen_values = true,
        value_name = "TOKENS"
    )]
    pub max_model_len: MaxModelLenArg,
    /// Download folder [default: the hub's cache folder]
    #[arg(long, value_name = "DIR")]
    pub download_dir: Option<std::path::PathBuf>,
}

impl ModelArgs {
    /// Returns the overrides of `config.json` of all `--hf-overrides` flags. If several flags set the same
    /// key, the last one takes precedence.
    pub fn config_overrides(&self) -> Map<String, Value> {
        self.hf_overrides
            .iter()
            .flatten()
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect()
    }
}

/// Data type of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DtypeArg {
    /// Data type that config.json states
    Auto,
    /// bfloat16
    #[value(alias = "bf16")]
    Bfloat16,
    /// Half precision: three more mantissa bits than bfloat16, maximum 65504
    #[value(alias = "fp16", alias = "half")]
    Float16,
    /// Single precision, with which other types are compared
    #[value(alias = "fp32", alias = "float")]
    Float32,
}

/// Format of the weights to load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoadFormatArg {
    /// Same as safetensors
    Auto,
    /// Safetensors files
    Safetensors,
    /// Random weights that --seed determines
    #[value(alias = "dummy")]
    Synth,
}

impl ModelArgs {
    /// Merges MODEL with `--model`, and rejects invalid values. `served_names_variadic`:
    /// `--served-model-name` was given without `=`; in this form it consumes all arguments after it.
    pub(super) fn resolve(&mut self, served_names_variadic: bool) -> Result<(), CommandLineError> {
        if let Some(flag) = self.model_flag.take() {
            match &self.model {
                Some(model) if *model != flag => {
                    return rejected(format!("two models are given: {model} and --model {flag}"));
                }
                _ => self.model = Some(flag),
            }
        }
        if self.model.is_none() && served_names_variadic {
            self.check_served_names()?;
        }
        if let Some(tokens @ 0..2) = self.max_model_len.tokens() {
            return rejected(format!(
                "--max-model-len {tokens}: at least 2, one prompt token and one output token"
            ));
        }
        Ok(())
    }

    /// Rejects a command line in which `--served-model-name` may have consumed MODEL: without MODEL, the demo
    /// model would be served under the name of the intended model.
    fn check_served_names(&self) -> Result<(), CommandLineError> {
        let names = &self.served_model_name;
        let possible_model = match names.as_slice() {
            [] => None,
            [one] => Some(one).filter(|name| std::path::Path::new(name).exists()),
            [.., last] => Some(last),
        };
        match possible_model {
            Some(last) => rejected(format!(
                "--served-model-name {}: is {last} the model? No MODEL is given; put it before \
                 the flag, or use --model {last}",
                names.join(" ")
            )),
            None => Ok(()),
        }
    }
}
