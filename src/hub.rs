//! Locates model files: in a local folder, or in a hub repository that is downloaded into the cache.
//!
//! Only files that are needed for serving are downloaded. The cache has the layout that all Hugging Face
//! tools share. An interrupted download is resumed; a file with a wrong length is deleted. File names from
//! the hub are accepted only if they are plain names of requested files.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use text::TOKENIZER_FILES;

use crate::config::ProcessEnvironment;
use crate::progress::{ProgressReporter, ProgressUnit};

/// Maximum number of attempts to transfer a file.
const ATTEMPTS_MAX: u32 = 5;

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

/// Folder of additional chat templates, which are downloaded with the tokenizer files.
const TEMPLATE_FOLDER: &str = "additional_chat_templates/";

const INDEX_FILE: &str = "model.safetensors.index.json";
const SINGLE_WEIGHTS_FILE: &str = "model.safetensors";

/// Subset of the files of a model repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HubFileSet {
    /// All files that are needed for serving.
    Everything,
    /// All files that are needed for serving except the weights, which are synthetic.
    WithoutWeights,
    /// Tokenizer files only.
    Tokenizer,
    /// Weights and configuration, without the tokenizer. For a draft model, which uses the tokenizer of the
    /// target model.
    Weights,
    /// Configuration files only.
    Config,
}

impl HubFileSet {
    fn has_text(self) -> bool {
        !matches!(self, Self::Weights | Self::Config)
    }

    fn has_weights(self) -> bool {
        matches!(self, Self::Everything | Self::Weights)
    }
}

/// Reason why the files of a model cannot be located or downloaded.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The name is a path that does not exist.
    #[error(
        "{0}: no such model folder; MODEL is a folder with config.json, a tokenizer and safetensors files, \
         or a hub id such as owner/name"
    )]
    FolderMissing(String),
    /// The name is neither an existing folder nor `name` or `owner/name`.
    #[error("{0}: neither a model folder nor a hub id such as owner/name")]
    InvalidId(String),
    /// The name has no owner, is no folder, and was not obtained from the hub.
    #[error(
        "{name}: there is no such folder in the working directory, and hub ids have the form owner/name: \
         {reason}"
    )]
    OwnerMissing {
        /// Name of the model.
        name: String,
        /// Reason why the hub did not send the model.
        reason: Box<HubError>,
    },
    /// The name is a file.
    #[error(
        "{0} is a file; MODEL is a folder with config.json, a tokenizer and safetensors files. GGUF and \
         pickle files are not read: serve the original model, which has safetensors files"
    )]
    NotAFolder(String),
    /// The hub cannot be reached, and no folder has the name.
    #[error(
        "{id}: there is no such folder, and the hub at {endpoint} cannot be reached: {reason}. Give the path of \
         a model folder, or set HF_ENDPOINT to a reachable hub"
    )]
    Unreachable {
        /// Hub id of the model.
        id: String,
        /// URL of the hub.
        endpoint: String,
        /// Cause of the last failed attempt.
        reason: String,
    },
    /// The hub has no such repository or revision.
    #[error(
        "{id}: there is no such folder, and the hub at {endpoint} has no such model or revision ({revision})"
    )]
    NotFound {
        /// Hub id of the model.
        id: String,
        /// Requested branch, tag or commit.
        revision: String,
        /// URL of the hub.
        endpoint: String,
    },
    /// The hub requires a token, or the configured token gives no access.
    #[error("{id}: access denied (status {status}); set HF_TOKEN to a token that may read it")]
    Denied {
        /// Hub id of the model.
        id: String,
        /// HTTP status of the response.
        status: u16,
    },
    /// The repository does not have a file that is needed for serving.
    #[error("{id}: the repository has no {file}{hint}")]
    FileMissing {
        /// Hub id of the model.
        id: String,
        /// Name of the missing file.
        file: String,
        /// What the repository has instead, and the remedy; may be empty.
        hint: &'static str,
    },
    /// The transfer of a file, or a request to the hub, failed.
    #[error("{id}: {file}: {reason}")]
    Transfer {
        /// Hub id of the model.
        id: String,
        /// Name of the file in transfer, or of the failed request to the hub.
        file: String,
        /// Cause of the last failed attempt.
        reason: String,
    },
    /// Offline mode is set, and the cache does not have all files.
    #[error("{id}: not in the cache at {cache}, and HF_HUB_OFFLINE disables requests to the hub")]
    Offline {
        /// Hub id of the model.
        id: String,
        /// Root folder of the hub cache.
        cache: String,
    },
    /// No folder for the hub cache is configured.
    #[error("no cache folder: set HF_HOME or --download-dir")]
    CacheFolderUnknown,
}

impl HubError {
    /// Whether another hub id may avoid the error.
    fn is_about_id(&self) -> bool {
        matches!(
            self,
            Self::Unreachable { .. }
                | Self::NotFound { .. }
                | Self::Denied { .. }
                | Self::Offline { .. }
        )
    }
}

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
            return Err(HubError::FileMissing { id, file, hint: format_hint(available) });
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
            let (id, hint) = (self.id.clone(), format_hint(available));
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

    /// Downloads one file, or resumes its download. A file that is complete in the cache is not downloaded
    /// again.
    fn download(&self, repo: &ApiRepo, file: &str) -> Result<PathBuf, HubError> {
        self.with_retries(file, || {
            let metadata = self.api.metadata(&repo.url(file))?;
            let cached_repo = self.cache.repo(self.repo(metadata.commit_hash()));
            let blob = cached_repo.blob_path(metadata.etag());
            let pointer = cached_repo.pointer_path(metadata.commit_hash()).join(file);
            let size = metadata.size() as u64;
            let complete = |path: &Path| path.metadata().is_ok_and(|m| m.len() == size);
            if complete(&pointer) {
                return Ok(pointer);
            }
            let part = blob.with_extension("part");
            // A partially downloaded file (`.part`) of the full size cannot be resumed, because the requested
            // byte range would be empty. A longer file is corrupt.
            if part.metadata().is_ok_and(|m| m.len() >= size) {
                std::fs::remove_file(&part)?;
            }
            let path = repo.download_with_progress(file, TransferProgress::new())?;
            if complete(&path) {
                return Ok(path);
            }
            // The file has a wrong length because the server ignored the requested byte range. It is corrupt
            // and is deleted.
            std::fs::remove_file(&path)?;
            std::fs::remove_file(&blob)?;
            Err(ApiError::InvalidResume)
        })
    }

    /// Returns the error to report for a transfer that is not retried.
    fn last_error(&self, what: &str, error: &ApiError) -> HubError {
        match (what, status(error)) {
            (FILE_LIST, None) => HubError::Unreachable {
                id: self.id.clone(),
                endpoint: self.options.endpoint.clone(),
                reason: error.to_string(),
            },
            _ => self.transfer_error(what, error),
        }
    }

    /// Runs `work` until it succeeds, fails with a permanent error, or has failed `ATTEMPTS_MAX` times.
    fn with_retries<T>(
        &self,
        what: &str,
        work: impl Fn() -> Result<T, ApiError>,
    ) -> Result<T, HubError> {
        let mut attempt = 1;
        loop {
            let error = match work() {
                Ok(value) => return Ok(value),
                Err(error) => error,
            };
            if let Some(permanent) = status(&error).and_then(|s| self.permanent_error(what, s)) {
                return Err(permanent);
            }
            // A name without an owner is rarely a hub id, so the first failure to reach the hub is reported.
            let is_unlikely =
                what == FILE_LIST && status(&error).is_none() && !self.id.contains('/');
            if attempt == ATTEMPTS_MAX || is_unlikely {
                return Err(self.last_error(what, &error));
            }
            tracing::warn!("{}: {what}: {error}; retrying", self.id);
            std::thread::sleep(Duration::from_millis(250 << attempt));
            attempt += 1;
        }
    }

    /// Maps an HTTP status of the hub to a permanent error; `None` = a retry may succeed.
    fn permanent_error(&self, what: &str, status: u16) -> Option<HubError> {
        let id = self.id.clone();
        match status {
            404 => Some(HubError::NotFound {
                id,
                revision: self.revision.clone(),
                endpoint: self.options.endpoint.clone(),
            }),
            401 | 403 => Some(HubError::Denied { id, status }),
            408 | 429 | 500.. => None,
            _ => Some(self.transfer_error(what, &format!("status {status}"))),
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

    fn transfer_error(&self, file: &str, reason: &dyn std::fmt::Display) -> HubError {
        HubError::Transfer {
            id: self.id.clone(),
            file: file.to_owned(),
            reason: reason.to_string(),
        }
    }
}

/// Returns a hint for the error about missing safetensors files: which other weights format the repository
/// has.
fn format_hint(available: &BTreeSet<String>) -> &'static str {
    let has = |extension: &str| {
        available.iter().any(|file| Path::new(file).extension().is_some_and(|e| e == extension))
    };
    if has("gguf") {
        "; GGUF is not supported: serve the original model, which has safetensors files"
    } else if has("bin") || has("pth") || has("pt") {
        "; pickle files (.bin, .pth) can run code and are not read: convert them with \
         save_pretrained(safe_serialization=True) of transformers"
    } else {
        ""
    }
}

/// Whether a file is one of the additional chat templates.
fn is_named_template(file: &str) -> bool {
    let name = file.strip_prefix(TEMPLATE_FOLDER).and_then(|name| name.strip_suffix(".jinja"));
    name.is_some_and(|name| !name.is_empty() && !name.contains('/'))
}

/// Returns the HTTP status of an error, if the hub sent a response.
fn status(error: &ApiError) -> Option<u16> {
    match error {
        ApiError::RequestError(error) => match **error {
            ureq::Error::StatusCode(status) => Some(status),
            _ => None,
        },
        _ => None,
    }
}

/// Returns the names of the weight files in a safetensors index. Rejects names that are not plain file names.
fn shards(index: &[u8]) -> Result<BTreeSet<String>, String> {
    /// Contents of `model.safetensors.index.json`.
    #[derive(serde::Deserialize)]
    struct SafetensorsIndex {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let index: SafetensorsIndex = serde_json::from_slice(index).map_err(|e| e.to_string())?;
    let files: BTreeSet<String> = index.weight_map.into_values().collect();
    match files.iter().find(|name| !name.ends_with(".safetensors") || name.contains(['/', '\\'])) {
        Some(name) => Err(format!("{name:?} is not the name of a tensor file")),
        None => Ok(files),
    }
}

/// Shows the progress of one file transfer.
struct TransferProgress {
    bar: Option<ProgressReporter>,
    done: u64,
    total: u64,
}

impl TransferProgress {
    fn new() -> Self {
        Self { bar: None, done: 0, total: 0 }
    }
}

impl hf_hub::api::Progress for TransferProgress {
    fn init(&mut self, size: usize, file: &str) {
        self.total = size as u64;
        self.done = 0;
        let label = format!("download {file}");
        self.bar
            .get_or_insert_with(|| ProgressReporter::new(&label, size as u64, ProgressUnit::Bytes));
    }

    fn update(&mut self, bytes: usize) {
        self.done += bytes as u64;
        if let Some(bar) = &self.bar {
            bar.set(self.done, self.total);
        }
    }

    fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish();
        }
    }
}

#[cfg(test)]
mod tests;
