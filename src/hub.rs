//! Locates model files: in a local folder, or in a hub repository that is downloaded into the cache.
//!
//! Only files that are needed for serving are downloaded. The cache has the layout that all Hugging Face
//! tools share. An interrupted download is resumed; a file with a wrong length is deleted. File names from
//! the hub are accepted only if they are plain names of requested files.

mod error;
mod file_selection;
mod transfer;

pub use error::HubError;
pub use file_selection::HubFileSet;
use file_selection::{is_named_template, shards};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use hf_hub::api::sync::{Api, ApiBuilder, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use models::format_hint;
use text::TOKENIZER_FILES;

use crate::config::ProcessEnvironment;

/// Configuration files, which are downloaded if the repository has them.
const CONFIG_FILES: &[&str] = &["config.json", "generation_config.json"];

/// Optional files that supplement the tokenizer definition; they are downloaded if the repository has them.
const TEXT_FILES: &[&str] = &[
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// Files with which sentence-transformers describes pooling, downloaded if the repository has them.
const POOLING_FILES: &[&str] = &["modules.json", "1_Pooling/config.json"];

/// Placeholder for a file name in error messages about the request for the repository's list of files.
const FILE_LIST: &str = "file list";

const INDEX_FILE: &str = "model.safetensors.index.json";
const SINGLE_WEIGHTS_FILE: &str = "model.safetensors";

/// Settings for access to the hub and for its cache.
#[derive(Debug, Clone)]
pub struct HubOptions {
    /// Root folder of the hub cache.
    pub cache: PathBuf,
    /// Base URL of the hub.
    pub endpoint: String,
    /// Access token of the hub.
    pub token: Option<String>,
    /// Whether requests to the hub are disabled.
    pub offline: bool,
}

impl HubOptions {
    /// Reads the settings from the environment. `download_dir` replaces the root folder of the cache.
    pub fn new(
        environment: &ProcessEnvironment,
        download_dir: Option<&Path>,
    ) -> Result<Self, HubError> {
        let cache = download_dir.map(Path::to_owned).or_else(|| environment.hub_cache.clone());
        let endpoint = environment.hub_endpoint.clone();
        Ok(Self {
            cache: cache.ok_or(HubError::CacheFolderUnknown)?,
            endpoint: endpoint.unwrap_or_else(|| "https://huggingface.co".to_owned()),
            token: environment.hub_token.clone(),
            offline: environment.hub_offline,
        })
    }
}

/// Returns the folder with the files of `model`, which is a path or a hub id. Blocks while files are
/// downloaded.
pub fn resolve(
    model: &str,
    revision: Option<&str>,
    file_set: HubFileSet,
    environment: &ProcessEnvironment,
    download_dir: Option<&Path>,
) -> Result<PathBuf, HubError> {
    if Path::new(model).is_dir() {
        return Ok(PathBuf::from(model));
    }
    check_hub_id(model)?;
    let fetched = HubRepository::new(model, revision, HubOptions::new(environment, download_dir)?)?
        .fetch(file_set);
    match fetched {
        Err(reason) if !model.contains('/') && reason.is_about_id() => {
            Err(HubError::OwnerMissing { name: model.to_owned(), reason: Box::new(reason) })
        }
        fetched => fetched,
    }
}

/// Checks that `model`, which is not a folder, is a hub id.
fn check_hub_id(model: &str) -> Result<(), HubError> {
    if Path::new(model).is_file() {
        return Err(HubError::NotAFolder(model.to_owned()));
    }
    if model.starts_with(['.', '/', '~']) || model.matches('/').count() > 1 {
        return Err(HubError::FolderMissing(model.to_owned()));
    }
    let is_plain = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    if !model.split('/').all(is_plain) || Path::new(model).exists() {
        return Err(HubError::InvalidId(model.to_owned()));
    }
    Ok(())
}

/// A model repository of the hub at one revision.
struct HubRepository {
    id: String,
    revision: String,
    options: HubOptions,
    api: Api,
    cache: Cache,
}

impl HubRepository {
    fn new(id: &str, revision: Option<&str>, options: HubOptions) -> Result<Self, HubError> {
        let cache = Cache::new(options.cache.clone());
        let api = ApiBuilder::from_cache(cache.clone())
            .with_endpoint(options.endpoint.trim_end_matches('/').to_owned())
            .with_token(options.token.clone())
            .with_progress(false)
            .with_retries(0) // The client's retries append to a resumed file at the wrong offset.
            .build();
        let revision = revision.unwrap_or("main").to_owned();
        let api = api.map_err(|error| HubError::Transfer {
            id: id.to_owned(),
            file: "hub".to_owned(),
            reason: error.to_string(),
        })?;
        Ok(Self { id: id.to_owned(), revision, options, api, cache })
    }

    fn repo(&self, revision: &str) -> Repo {
        Repo::with_revision(self.id.clone(), RepoType::Model, revision.to_owned())
    }

    fn fetch(&self, file_set: HubFileSet) -> Result<PathBuf, HubError> {
        if self.options.offline {
            return self.cached(file_set);
        }
        let info =
            self.with_retries(FILE_LIST, || self.api.repo(self.repo(&self.revision)).info())?;
        let available: BTreeSet<String> = info.siblings.into_iter().map(|s| s.rfilename).collect();
        // All files are taken from one commit, even if the branch changes during the download.
        let pinned = self.api.repo(self.repo(&info.sha));
        let mut files = self.small_files(file_set, &available)?;
        if file_set.has_weights() {
            files.extend(self.weight_files(&pinned, &available)?);
        }
        for file in &files {
            self.download(&pinned, file)?;
        }
        let named = self.cache.repo(self.repo(&self.revision));
        named.create_ref(&info.sha).map_err(|e| self.transfer_error("refs", &e))?;
        Ok(named.pointer_path(&info.sha))
    }

    fn small_files(
        &self,
        file_set: HubFileSet,
        available: &BTreeSet<String>,
    ) -> Result<Vec<String>, HubError> {
        let (mut names, mut required) = (Vec::<&str>::new(), Vec::new());
        if file_set.has_text() {
            let defining = TOKENIZER_FILES.into_iter().find(|file| available.contains(*file));
            names.extend(defining);
            names.extend(TEXT_FILES);
            names.extend(available.iter().map(String::as_str).filter(|n| is_named_template(n)));
            required.push(defining.unwrap_or(TOKENIZER_FILES[0]));
        }
        if file_set != HubFileSet::Tokenizer {
            names.extend(CONFIG_FILES);
            names.extend(POOLING_FILES.iter().filter(|_| file_set.has_text()));
            required.push("config.json");
        }
        if let Some(file) = required.into_iter().find(|file| !available.contains(*file)) {
            let (id, file) = (self.id.clone(), file.to_owned());
            return Err(HubError::FileMissing {
                id,
                file,
                hint: format_hint(available.iter().map(String::as_str)),
            });
        }
        Ok(names.into_iter().filter(|n| available.contains(*n)).map(str::to_owned).collect())
    }

    /// Returns the names of the weight files: the shards in the index, or the single weights file. Other
    /// tensor files are not read.
    fn weight_files(
        &self,
        repo: &ApiRepo,
        available: &BTreeSet<String>,
    ) -> Result<Vec<String>, HubError> {
        if !available.contains(INDEX_FILE) {
            if available.contains(SINGLE_WEIGHTS_FILE) {
                return Ok(vec![SINGLE_WEIGHTS_FILE.to_owned()]);
            }
            let file = SINGLE_WEIGHTS_FILE.to_owned();
            let hint = format_hint(available.iter().map(String::as_str));
            let id = self.id.clone();
            return Err(HubError::FileMissing { id, file, hint });
        }
        let path = self.download(repo, INDEX_FILE)?;
        let bytes = std::fs::read(path).map_err(|e| self.transfer_error(INDEX_FILE, &e))?;
        let shards = shards(&bytes).map_err(|reason| self.transfer_error(INDEX_FILE, &reason))?;
        match shards.iter().find(|shard| !available.contains(*shard)) {
            Some(shard) => {
                let (id, file) = (self.id.clone(), shard.clone());
                Err(HubError::FileMissing { id, file, hint: "" })
            }
            None => Ok(shards.into_iter().collect()),
        }
    }

    /// Returns the folder of an earlier download, if all files of `file_set` are in the cache.
    fn cached(&self, file_set: HubFileSet) -> Result<PathBuf, HubError> {
        let cached_repo = self.cache.repo(self.repo(&self.revision));
        let folder_of =
            |file: &str| cached_repo.get(file).and_then(|path| Some(path.parent()?.to_owned()));
        let incomplete = || HubError::Offline {
            id: self.id.clone(),
            cache: self.options.cache.display().to_string(),
        };
        let first: &[&str] = if file_set.has_text() { &TOKENIZER_FILES } else { &["config.json"] };
        let dir = first.iter().find_map(|file| folder_of(file)).ok_or_else(incomplete)?;
        if file_set != HubFileSet::Tokenizer {
            folder_of("config.json").ok_or_else(incomplete)?;
        }
        if file_set.has_weights() {
            let index = std::fs::read(dir.join(INDEX_FILE)).ok();
            let files = match index {
                Some(bytes) => {
                    shards(&bytes).map_err(|reason| self.transfer_error(INDEX_FILE, &reason))?
                }
                None => BTreeSet::from([SINGLE_WEIGHTS_FILE.to_owned()]),
            };
            if !files.iter().all(|file| dir.join(file).exists()) {
                return Err(incomplete());
            }
        }
        Ok(dir)
    }
}

#[cfg(test)]
mod tests;
