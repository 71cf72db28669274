//! Downloads of single files, with retries and a progress report.

use super::{FILE_LIST, HubError, HubRepository};
use crate::progress::{ProgressReporter, ProgressUnit};
use hf_hub::api::sync::{ApiError, ApiRepo};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Maximum number of attempts to transfer a file.
const ATTEMPTS_MAX: u32 = 5;

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

/// Shows the progress of one file transfer.
struct TransferProgress {
    bar: Option<ProgressReporter>,
    done: u64,
    total: u64,
}

impl TransferProgress {
    pub(super) fn new() -> Self {
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

impl HubRepository {
    /// Downloads one file, or resumes its download. A file that is complete in the cache is not downloaded
    /// again.
    pub(super) fn download(&self, repo: &ApiRepo, file: &str) -> Result<PathBuf, HubError> {
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
    pub(super) fn with_retries<T>(
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

    pub(super) fn transfer_error(&self, file: &str, reason: &dyn std::fmt::Display) -> HubError {
        HubError::Transfer {
            id: self.id.clone(),
            file: file.to_owned(),
            reason: reason.to_string(),
        }
    }
}
