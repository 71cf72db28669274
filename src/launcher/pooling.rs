//! Selects text generation or pooling for a model, from flags, the architecture, and the files that
//! sentence-transformers writes.

use crate::config::{ConvertArg, PoolerConfigArg, PoolingArgs, PoolingTypeArg, RunnerArg};
use anyhow::{Context, Result, bail};
use models::ModelConfig;
use models::config::ModelHead;
use protocol::PoolingMethod;
use serde::Deserialize;
use serde_json::{Map, Value};
use server::pooling::{MatryoshkaDimensions, PoolerSettings, PoolingTask};
use std::fs;
use std::path::{Path, PathBuf};
use text::Tokenizer;

/// Pooling settings of the served model, before the ids of the classifier tokens are looked up in the
/// tokenizer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnresolvedPooling {
    pooling_type: PoolingTypeArg,
    use_activation: bool,
    dimensions: Option<u32>,
    task: PoolingTask,
}

/// Module of a sentence-transformers model, listed in `modules.json`.
#[derive(Debug, Deserialize)]
struct SentenceTransformersModule {
    path: String,
    #[serde(rename = "type")]
    kind: String,
}

/// Pooling that `modules.json` describes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SentenceTransformersPooling {
    /// File that describes the pooling type.
    config: PathBuf,
    /// First module that projects the pooled vector, if there is one. Such models are not supported.
    projection: Option<String>,
    normalises: bool,
}

/// Returns the pooling settings of a model; `None` = the model generates text.
///
/// Errors: the runner or the pooling that a flag selects does not fit the model.
pub(super) fn plan(
    args: &PoolingArgs,
    dir: &Path,
    config: &ModelConfig,
) -> Result<Option<UnresolvedPooling>> {
    let generates = config.head.generates();
    match args.runner {
        RunnerArg::Generate if !generates => {
            bail!(
                "--runner generate: the architecture in config.json has no LM head to generate text with"
            )
        }
        RunnerArg::Generate => return rejects_pooling_flags(args),
        RunnerArg::Auto if generates && !dir.join(MODULES).exists() => {
            return rejects_pooling_flags(args);
        }
        RunnerArg::Auto | RunnerArg::Pooling => {}
    }
    let described = sentence_pooling(dir).with_context(|| dir.join(MODULES).display().to_string());
    if matches!(described, Ok(None)) && generates && args.runner == RunnerArg::Auto {
        return rejects_pooling_flags(args);
    }
    let given = args.pooler_config.unwrap_or_default();
    match task(args.convert, &config.head)? {
        // Scores do not depend on `modules.json`, so errors in this file are ignored.
        PoolingTask::Score => score_plan(given, &config.head).map(Some),
        PoolingTask::Embed => embedding_plan(given, described?).map(Some),
    }
}

/// Returns the pooling settings of a model that scores text pairs.
///
/// Errors: `--pooler-config` has settings of embeddings.
fn score_plan(given: PoolerConfigArg, head: &ModelHead) -> Result<UnresolvedPooling> {
    let PoolerConfigArg { use_activation, .. } = given;
    if given != (PoolerConfigArg { use_activation, ..PoolerConfigArg::default() }) {
        bail!(
            "--pooler-config: scores are computed from the last token; only use_activation applies"
        );
    }
    let of_model = match head {
        ModelHead::Classifier { sigmoid } => *sigmoid,
        _ => true,
    };
    Ok(UnresolvedPooling {
        pooling_type: PoolingTypeArg::Last,
        use_activation: use_activation.unwrap_or(of_model),
        dimensions: None,
        task: PoolingTask::Score,
    })
}

/// Returns the pooling settings of an embedding model. The pooling type of `--pooler-config` replaces the
/// type in `modules.json`, even if the type in `modules.json` is not supported.
///
/// Errors: the model has a projection after pooling, or its pooling type is not supported.
fn embedding_plan(
    given: PoolerConfigArg,
    described: Option<SentenceTransformersPooling>,
) -> Result<UnresolvedPooling> {
    if let Some(path) = described.as_ref().and_then(|described| described.projection.as_ref()) {
        bail!("module {path}: projections after pooling are not supported");
    }
    let pooling_type = match (given.pooling_type, &described) {
        (Some(pooling_type), _) => pooling_type,
        (None, Some(described)) => described.pooling_type()?,
        (None, None) => PoolingTypeArg::Last,
    };
    let of_model = described.is_none_or(|described| described.normalises);
    Ok(UnresolvedPooling {
        pooling_type,
        use_activation: given.use_activation.unwrap_or(of_model),
        dimensions: given.dimensions,
        task: PoolingTask::Embed,
    })
}

/// Name of the file in which sentence-transformers lists the modules of a model.
const MODULES: &str = "modules.json";

/// Returns `None` (the model generates text) if no pooling flag is given.
///
/// Errors: a pooling flag is given.
fn rejects_pooling_flags(args: &PoolingArgs) -> Result<Option<UnresolvedPooling>> {
    let converts = matches!(args.convert, ConvertArg::Embed | ConvertArg::Classify);
    if converts || args.pooler_config.is_some() {
        bail!("--convert and --pooler-config need --runner pooling; this model generates text");
    }
    Ok(None)
}

/// Returns the pooling task: scores or embeddings.
///
/// Errors: scores are requested from a model without a classification head.
fn task(convert: ConvertArg, head: &ModelHead) -> Result<PoolingTask> {
    let classifies =
        matches!(head, ModelHead::Classifier { .. } | ModelHead::TokenClassifier { .. });
    match convert {
        ConvertArg::Auto | ConvertArg::None | ConvertArg::Classify if classifies => {
            Ok(PoolingTask::Score)
        }
        ConvertArg::Classify => bail!(
            "--convert classify: the checkpoint has no classification head; a reranker with an LM head needs \
             --hf-overrides with an architecture ...ForSequenceClassification and classifier_from_token"
        ),
        ConvertArg::Auto | ConvertArg::None | ConvertArg::Embed => Ok(PoolingTask::Embed),
    }
}

/// Reads the pooling that `modules.json` describes; `None` = the model has no such file, or no pooling.
fn sentence_pooling(dir: &Path) -> Result<Option<SentenceTransformersPooling>> {
    let Ok(text) = fs::read_to_string(dir.join(MODULES)) else { return Ok(None) };
    let modules: Vec<SentenceTransformersModule> = serde_json::from_str(&text)?;
    let is =
        |module: &&SentenceTransformersModule, name| module.kind.rsplit('.').next() == Some(name);
    let Some(pooling) = modules.iter().find(|module| is(module, "Pooling")) else {
        return Ok(None);
    };
    if pooling.path.split('/').any(|part| part == "..") || pooling.path.starts_with('/') {
        bail!("module path {} leaves the model folder", pooling.path);
    }
    let projection = modules.iter().find(|module| is(module, "Dense"));
    Ok(Some(SentenceTransformersPooling {
        config: dir.join(&pooling.path).join("config.json"),
        projection: projection.map(|module| module.path.clone()),
        normalises: modules.iter().any(|module| is(&module, "Normalize")),
    }))
}

impl SentenceTransformersPooling {
    /// Reads the pooling type.
    fn pooling_type(&self) -> Result<PoolingTypeArg> {
        let read = || -> Result<_> {
            let text = fs::read_to_string(&self.config)?;
            pooling_type(&serde_json::from_str(&text)?)
        };
        read().with_context(|| self.config.display().to_string())
    }
}

/// Returns the pooling type of a pooling module's configuration, which has a flag per type.
fn pooling_type(modes: &Map<String, Value>) -> Result<PoolingTypeArg> {
    let is_set = |name: &str| modes.get(name).and_then(Value::as_bool).unwrap_or(false);
    let enabled: Vec<&str> = modes
        .keys()
        .map(String::as_str)
        .filter(|name| name.starts_with("pooling_mode_") && is_set(name))
        .collect();
    let mode = modes.get("pooling_mode").and_then(Value::as_str);
    match (enabled.as_slice(), mode) {
        (["pooling_mode_lasttoken"], _) | ([], Some("lasttoken")) => Ok(PoolingTypeArg::Last),
        (["pooling_mode_mean_tokens"], _) | ([], Some("mean")) => Ok(PoolingTypeArg::Mean),
        (modes, mode) => bail!(
            "pooling mode {modes:?} {}: supported are the last token and the mean of all tokens",
            mode.unwrap_or_default()
        ),
    }
}

impl UnresolvedPooling {
    fn method(&self, config: &ModelConfig, tokenizer: &Tokenizer) -> Result<PoolingMethod> {
        Ok(match (&config.head, self.task, self.pooling_type) {
            (ModelHead::TokenClassifier { tokens }, PoolingTask::Score, _) => {
                let id = |token: &String| {
                    let id = tokenizer.token_id(token).filter(|&id| (id as usize) < config.vocab);
                    id.with_context(|| format!("classifier_from_token: {token:?} is no token"))
                };
                PoolingMethod::TokenLogprobs(tokens.iter().map(id).collect::<Result<_>>()?)
            }
            (_, PoolingTask::Score, _) => PoolingMethod::ClassLogits,
            (_, PoolingTask::Embed, PoolingTypeArg::Last) => PoolingMethod::LastToken,
            (_, PoolingTask::Embed, PoolingTypeArg::Mean) => PoolingMethod::Mean,
        })
    }

    /// Returns the pooling settings of the server, with the ids of the classifier tokens.
    ///
    /// Errors: a classifier token is not in the vocabulary; the dimensions do not fit the model.
    pub(super) fn settings(
        &self,
        config: &ModelConfig,
        tokenizer: &Tokenizer,
        has_pair_template: bool,
    ) -> Result<PoolerSettings> {
        let method = self.method(config, tokenizer)?;
        let settings = PoolerSettings {
            task: self.task,
            method,
            hidden_size: config.hidden as u32,
            use_activation: self.use_activation,
            dimensions: self.dimensions,
            matryoshka: match &config.matryoshka {
                None => MatryoshkaDimensions::Unsupported,
                Some(listed) if listed.is_empty() => MatryoshkaDimensions::Any,
                Some(listed) => MatryoshkaDimensions::Listed(listed.clone()),
            },
            has_pair_template,
        };
        settings
            .check()
            .map_err(|message| anyhow::anyhow!("--pooler-config dimensions: {message}"))?;
        Ok(settings)
    }
}

#[cfg(test)]
mod tests;
