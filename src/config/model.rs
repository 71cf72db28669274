//! Flags that select the model and its files.

use clap::{Args, ValueEnum};
use serde_json::{Map, Value};

use super::units::{MaxModelLenArg, json_object};
use super::{CommandLineError, rejected};

/// Model and its loading options.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// A model folder or a hub id; without it the demo model is served
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// The same as MODEL
    #[arg(long = "model", alias = "model-path", value_name = "MODEL")]
    model_flag: Option<String>,
    /// Branch, tag or commit of a hub id
    #[arg(long)]
    pub revision: Option<String>,
    /// Folder or hub id of the tokenizer, if it is not the model's own
    #[arg(long)]
    pub tokenizer: Option<String>,
    /// Names the API answers to; the first is the one it reports. Takes all that follow: MODEL goes first
    #[arg(long, num_args = 1.., value_name = "NAME")]
    pub served_model_name: Vec<String>,
    /// Members to replace in config.json
    #[arg(long, value_parser = json_object, value_name = "JSON")]
    pub hf_overrides: Option<Map<String, Value>>,
    /// Type of the weights and activations; auto takes what config.json says
    #[arg(long, default_value = "auto")]
    pub dtype: DtypeArg,
    /// Where weights come from; synth generates them in place from config.json
    #[arg(long, default_value = "auto")]
    pub load_format: LoadFormatArg,
    /// Longest prompt plus output in tokens; auto is what config.json says, or less where the KV cache holds less
    #[arg(
        long,
        alias = "context-length",
        default_value = "auto",
        allow_hyphen_values = true,
        value_name = "TOKENS"
    )]
    pub max_model_len: MaxModelLenArg,
    /// Where downloads are kept [default: the hub's cache folder]
    #[arg(long, value_name = "DIR")]
    pub download_dir: Option<std::path::PathBuf>,
}

/// Data type of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DtypeArg {
    /// As config.json says
    Auto,
    /// The usual type of published weights
    #[value(alias = "bf16")]
    Bfloat16,
    /// Half precision: three more bits of mantissa than bfloat16, and nothing beyond 65504
    #[value(alias = "fp16", alias = "half")]
    Float16,
    /// The exact reference
    #[value(alias = "fp32", alias = "float")]
    Float32,
}

/// Format of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoadFormatArg {
    /// Safetensors files
    Auto,
    /// Safetensors files
    Safetensors,
    /// Deterministic random weights
    #[value(alias = "dummy")]
    Synth,
}

impl ModelArgs {
    /// Merges MODEL with `--model` and rejects invalid values. `names_swallow`: `--served-model-name` was
    /// given in the form that takes all arguments after it.
    pub(super) fn resolve(&mut self, names_swallow: bool) -> Result<(), CommandLineError> {
        if let Some(flag) = self.model_flag.take() {
            match &self.model {
                Some(model) if *model != flag => {
                    return rejected(format!("two models are named: {model} and --model {flag}"));
                }
                _ => self.model = Some(flag),
            }
        }
        if self.model.is_none() && names_swallow {
            self.check_served_names()?;
        }
        if let Some(tokens @ 0..2) = self.max_model_len.tokens() {
            return rejected(format!(
                "--max-model-len {tokens}: at least 2, a token to read and one to write"
            ));
        }
        Ok(())
    }

    /// Rejects a command line in which `--served-model-name` may have consumed MODEL: the demo model would be
    /// served under that name.
    fn check_served_names(&self) -> Result<(), CommandLineError> {
        let names = &self.served_model_name;
        let swallowed = match names.as_slice() {
            [] => None,
            [one] => Some(one).filter(|name| std::path::Path::new(name).exists()),
            [.., last] => Some(last),
        };
        match swallowed {
            Some(last) => rejected(format!(
                "--served-model-name {}: is {last} the model? No MODEL is named; put it in front of \
                 the flag, or say --model {last}",
                names.join(" ")
            )),
            None => Ok(()),
        }
    }
}
