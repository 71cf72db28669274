//! `generation_config.json`: BOS and EOS tokens and recommended sampling defaults of a checkpoint.

use super::ModelConfigError;
use super::json_fields::JsonFields;
use std::path::Path;

/// Sampling defaults and special tokens of a checkpoint, from `generation_config.json`; the file and all of
/// its fields are optional.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationConfig {
    /// EOS tokens; empty if `generation_config.json` has no `eos_token_id`.
    pub eos: Vec<u32>,
    /// BOS token, if `generation_config.json` has one.
    pub bos: Option<u32>,
    /// Temperature that the checkpoint recommends. The field `do_sample` is not read.
    pub temperature: Option<f32>,
    /// Top-p that the checkpoint recommends.
    pub top_p: Option<f32>,
    /// Top-k that the checkpoint recommends.
    pub top_k: Option<u32>,
    /// Min-p that the checkpoint recommends.
    pub min_p: Option<f32>,
    /// Repetition penalty that the checkpoint recommends.
    pub repetition_penalty: Option<f32>,
}

impl GenerationConfig {
    pub(super) fn read(dir: &Path) -> Result<Self, ModelConfigError> {
        let path = dir.join("generation_config.json");
        let fields =
            if path.exists() { JsonFields::read(&path)? } else { JsonFields::absent(&path) };
        let number = |field| Ok(fields.number_or_none(field)?.map(|x| x as f32));
        Ok(Self {
            eos: fields.tokens("eos_token_id")?,
            bos: fields.tokens("bos_token_id")?.first().copied(),
            temperature: number("temperature")?,
            top_p: number("top_p")?,
            top_k: fields.number_or_none("top_k")?.map(|x| x.max(0.0) as u32),
            min_p: number("min_p")?,
            repetition_penalty: number("repetition_penalty")?,
        })
    }
}
