//! `generation_config.json`: end tokens and the sampling defaults that a checkpoint recommends.

use super::ModelConfigError;
use super::json_fields::JsonFields;
use std::path::Path;

/// What a checkpoint says about generation; every field is optional, and so is the file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationConfig {
    /// Tokens that end a text; empty if the file does not say.
    pub eos: Vec<u32>,
    /// First token of a text.
    pub bos: Option<u32>,
    /// Recommended temperature; zero when the file says not to sample.
    pub temperature: Option<f32>,
    /// Recommended nucleus.
    pub top_p: Option<f32>,
    /// Recommended number of candidates.
    pub top_k: Option<u32>,
    /// Recommended floor relative to the likeliest token.
    pub min_p: Option<f32>,
    /// Recommended repetition penalty.
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
