//! Flags of embedding and scoring models.

use clap::{Args, ValueEnum};
use serde::Deserialize;

/// Flags that select between text generation and pooling.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Pooling")]
pub struct PoolingArgs {
    /// Generate text, or pool hidden states to embeddings and scores; auto selects pooling if the model folder
    /// describes an embedding or scoring model
    #[arg(long, default_value = "auto")]
    pub runner: RunnerArg,
    /// What pooling computes; auto and none select what the checkpoint was trained for: scores if it has a
    /// classification head, else embeddings
    #[arg(long, default_value = "auto")]
    pub convert: ConvertArg,
    /// Pooling settings instead of the model's: pooling_type (LAST or MEAN), use_activation, dimensions
    #[arg(long, alias = "override-pooler-config", value_parser = pooler_config, value_name = "JSON")]
    pub pooler_config: Option<PoolerConfigArg>,
}

/// Task of the served model: text generation or pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RunnerArg {
    /// Pooling if the model folder describes an embedding or scoring model, else text generation
    Auto,
    /// Text generation
    Generate,
    /// Embeddings or scores
    Pooling,
}

/// What pooling computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ConvertArg {
    /// What the checkpoint was trained for
    Auto,
    /// Same as auto
    None,
    /// Embeddings
    Embed,
    /// Scores of text pairs
    #[value(alias = "score")]
    Classify,
}

/// Pooling type of `--pooler-config`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum PoolingTypeArg {
    /// Hidden state of the last token.
    #[serde(rename = "LAST", alias = "last")]
    Last,
    /// Mean of the hidden states of all tokens.
    #[serde(rename = "MEAN", alias = "mean")]
    Mean,
}

/// Value of `--pooler-config`. Members that are null are absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolerConfigArg {
    /// Pooling type; `None` = that of the model.
    #[serde(alias = "seq_pooling_type")]
    pub pooling_type: Option<PoolingTypeArg>,
    /// Whether embeddings are normalised and scores are passed through a sigmoid.
    #[serde(alias = "normalize")]
    pub use_activation: Option<bool>,
    /// Number of dimensions of embeddings.
    pub dimensions: Option<u32>,
}

/// Parses the value of `--pooler-config`.
fn pooler_config(text: &str) -> Result<PoolerConfigArg, String> {
    const ONE_TOKEN: &str = "decoder models pool LAST or MEAN: under causal attention, the first token (CLS) sees no \
                             other token, and one vector per token (ALL, STEP) is not supported";
    let config: PoolerConfigArg = serde_json::from_str(text).map_err(|error| {
        let message = error.to_string();
        let is_type = ["`CLS`", "`ALL`", "`STEP`"].iter().any(|name| message.contains(name));
        if is_type { ONE_TOKEN.to_owned() } else { message }
    })?;
    match config.dimensions {
        Some(0) => Err("dimensions: at least 1".to_owned()),
        _ => Ok(config),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pooler_config_names_what_it_rejects() {
        let text = r#"{"pooling_type": "MEAN", "normalize": false, "dimensions": 32}"#;
        let config = PoolerConfigArg {
            pooling_type: Some(PoolingTypeArg::Mean),
            use_activation: Some(false),
            dimensions: Some(32),
        };
        assert_eq!(pooler_config(text), Ok(config));
        let nulls = r#"{"seq_pooling_type": null, "use_activation": null}"#;
        assert_eq!(pooler_config(nulls), Ok(PoolerConfigArg::default()));
        for (text, part) in [
            (r#"{"pooling_type": "CLS"}"#, "causal attention"),
            (r#"{"pooling_type": "ALL"}"#, "one vector per token"),
            (r#"{"enable_chunked_processing": true}"#, "enable_chunked_processing"),
            (r#"{"dimensions": 0}"#, "dimensions"),
            ("[]", "invalid"),
        ] {
            let error = pooler_config(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
