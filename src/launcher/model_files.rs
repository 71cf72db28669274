//! Locates the files of a model, and reads its configuration, tokenizer and chat template.

use super::pooling::{self, UnresolvedPooling};
use super::{demo_model, settings};
use crate::config::{DtypeArg, LoadFormatArg, ModelArgs, ProcessEnvironment, ServeArgs};
use crate::hub::{self, HubFileSet};
use anyhow::{Context, Result, bail};
use engine::WeightsDigestBaseline;
use models::ModelConfig;
use models::config::CheckpointDType;
use server::ServedModelNames;
use server::pooling::PoolerSettings;
use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use text::{ChatTemplate, Tokenizer};

/// Folders and configuration of the served model and of its draft model.
pub struct ModelFiles {
    /// Model name as the user gave it: path or hub id.
    pub name: String,
    /// Folder with the weights and `config.json`.
    pub dir: PathBuf,
    /// Folder with the tokenizer files.
    pub tokenizer_dir: PathBuf,
    /// Parsed `config.json`.
    pub config: ModelConfig,
    /// Format of the weights: safetensors files in `dir`, or synthetic weights.
    pub source: models::LoadFormat,
    /// Digest of the files in the model folders. An executor with a different digest has read different
    /// files.
    pub manifest: u64,
    /// Folder and parsed configuration of the draft model, if there is one.
    pub draft: Option<(PathBuf, ModelConfig)>,
    /// Maximum number of prompt and output tokens of a request: the value of `--max-model-len`, else the
    /// maximum of the model.
    pub max_model_len: u32,
    /// Pooling of the model; `None` = it generates text.
    pub pooling: Option<UnresolvedPooling>,
    /// Unpacked demo model, the files of which are removed on drop.
    _unpacked: Option<demo_model::UnpackedDemoModel>,
}

/// Returns the combined digest of a model folder and of the draft model's folder.
///
/// Errors: those of `models::manifest`.
pub fn manifest(dir: &Path, draft: Option<&Path>, source: models::LoadFormat) -> Result<u64> {
    let draft = draft.map(|dir| models::manifest(dir, source)).transpose()?;
    Ok(models::manifest(dir, source)? ^ draft.map_or(0, |digest| digest.rotate_left(1)))
}

/// Tokenizer and chat template of the served model, and its pooling settings if it is a pooling model.
pub struct TokenizerAndTemplate {
    /// Tokenizer of the model.
    pub tokenizer: Tokenizer,
    /// Chat template, if the model has one.
    pub template: Option<ChatTemplate>,
    /// Settings of pooling; `None` = the model generates text.
    pub pooler: Option<PoolerSettings>,
}

impl ModelFiles {
    /// Locates the files, downloads or unpacks them if necessary, and reads `config.json`.
    pub fn resolve(args: &ServeArgs, environment: &ProcessEnvironment) -> Result<Self> {
        let model = &args.model;
        let fetch = |name: &str, file_set| {
            let (revision, cache) = (model.revision.as_deref(), model.download_dir.as_deref());
            hub::resolve(name, revision, file_set, environment, cache)
        };
        let (name, dir, unpacked) = if let Some(name) = &model.model {
            let synth = model.load_format == LoadFormatArg::Synth;
            let file_set = if synth { HubFileSet::WithoutWeights } else { HubFileSet::Everything };
            (name.clone(), fetch(name, file_set)?, None)
        } else {
            let unpacked = demo_model::UnpackedDemoModel::new()?;
            (demo_model::NAME.to_owned(), unpacked.dir().to_owned(), Some(unpacked))
        };
        let tokenizer_dir = match &model.tokenizer {
            Some(name) => fetch(name, HubFileSet::Tokenizer)?,
            None => dir.clone(),
        };
        let config = ModelConfig::from_dir_with(&dir, &model.config_overrides())?;
        let source = settings::load_format(args);
        let draft = args.speculation.draft_model().map(|name| -> Result<_> {
            let synth = model.load_format == LoadFormatArg::Synth;
            let dir = fetch(name, if synth { HubFileSet::Config } else { HubFileSet::Weights })?;
            let config = ModelConfig::from_dir(&dir)?;
            Ok((dir, config))
        });
        let draft = draft.transpose().with_context(|| args.speculation.flag_in_error())?;
        let manifest = manifest(&dir, draft.as_ref().map(|(dir, _)| dir.as_path()), source)?;
        let max_model_len = max_model_len(model.max_model_len.tokens(), &config)?;
        let pooling = pooling::plan(&args.pooling, &dir, &config)?;
        Ok(Self {
            name,
            dir,
            tokenizer_dir,
            config,
            source,
            manifest,
            draft,
            max_model_len,
            pooling,
            _unpacked: unpacked,
        })
    }

    /// Loads the tokenizer and compiles the chat template.
    pub fn load_text(&self, args: &ServeArgs) -> Result<TokenizerAndTemplate> {
        let overrides = args.model.config_overrides();
        let model_config = ModelConfig::fields_with(&self.tokenizer_dir, &overrides)?;
        let tokenizer = Tokenizer::load_with(&self.tokenizer_dir, &model_config.into())?;
        let tokenizer = tokenizer.with_eos_ids(&self.config.eos);
        let tokenizer = tokenizer.with_memory(args.engine.max_text_memory.0);
        let output_bytes_max = settings::prompt_bytes_max(self.max_model_len);
        let template_arg = args.reply.chat_template.as_deref();
        let template =
            ChatTemplate::load(&self.tokenizer_dir, template_arg, &tokenizer, output_bytes_max)?;
        let has_template = template_arg.is_some();
        let pooler = self
            .pooling
            .as_ref()
            .map(|plan| plan.settings(&self.config, &tokenizer, has_template))
            .transpose()?;
        Ok(TokenizerAndTemplate { tokenizer, template, pooler })
    }

    /// Returns the served model names.
    pub fn served_names(&self, args: &ServeArgs) -> ServedModelNames {
        ServedModelNames::new(&args.model.served_model_name, &self.name)
    }

    /// Returns the data type of the activations for the requested type. `auto` selects the type of the
    /// checkpoint, or bfloat16 if the checkpoint states none.
    pub fn dtype(&self, requested: DtypeArg) -> executor::ModelDtype {
        match (requested, self.config.dtype) {
            (DtypeArg::Float32, _) | (DtypeArg::Auto, Some(CheckpointDType::F32)) => {
                executor::ModelDtype::Float32
            }
            (DtypeArg::Float16, _) | (DtypeArg::Auto, Some(CheckpointDType::F16)) => {
                executor::ModelDtype::Float16
            }
            (DtypeArg::Bfloat16 | DtypeArg::Auto, _) => executor::ModelDtype::Bfloat16,
        }
    }

    /// Returns the fingerprint of the served model, `hadron-<version>-<hash>`, with 8 hash digits. The hash
    /// covers `config.json`, its overrides, the weights format, the data type of the activations, and the
    /// digests of the weights that the executors loaded.
    pub fn fingerprint(
        &self,
        model: &ModelArgs,
        weights: &WeightsDigestBaseline,
    ) -> Result<String> {
        let path = self.dir.join("config.json");
        let config = fs::read(&path).with_context(|| path.display().to_string())?;
        let mut hasher = DefaultHasher::new();
        hasher.write(&config);
        hasher.write(serde_json::to_string(&model.config_overrides())?.as_bytes());
        hasher.write(format!("{:?} {:?}", self.source, self.dtype(model.dtype)).as_bytes());
        hasher.write_u64(weights.fingerprint());
        let hash = hasher.finish() as u32;
        Ok(format!("hadron-{}-{hash:08x}", env!("CARGO_PKG_VERSION")))
    }
}

/// Returns the maximum number of prompt and output tokens of a request: the requested value, else the maximum
/// of the model.
fn max_model_len(requested: Option<u32>, config: &ModelConfig) -> Result<u32> {
    let longest = u32::try_from(config.context_max()).unwrap_or(u32::MAX);
    if longest < 2 {
        bail!(
            "max_position_embeddings of config.json is {longest}: the model cannot generate tokens"
        );
    }
    match requested {
        Some(requested) if requested > longest => bail!(
            "--max-model-len {requested}: the model supports {longest} tokens \
             (max_position_embeddings and rope_scaling of config.json; --hf-overrides replaces them)"
        ),
        requested => Ok(requested.unwrap_or(longest)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_large_max_model_len_is_rejected_with_both_numbers() {
        let dir = demo_model::UnpackedDemoModel::new().unwrap();
        let config = ModelConfig::from_dir(dir.dir()).unwrap();
        let longest = config.context_max() as u32;
        assert_eq!(max_model_len(None, &config).unwrap(), longest);
        assert_eq!(max_model_len(Some(longest), &config).unwrap(), longest);
        let error = max_model_len(Some(longest + 1), &config).unwrap_err().to_string();
        assert!(error.contains(&format!("--max-model-len {}", longest + 1)), "{error}");
        assert!(error.contains(&format!("{longest} tokens")), "{error}");
    }
}
