//! Errors of downloads from a model hub.

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
    pub(super) fn is_about_id(&self) -> bool {
        matches!(
            self,
            Self::Unreachable { .. }
                | Self::NotFound { .. }
                | Self::Denied { .. }
                | Self::Offline { .. }
        )
    }
}
