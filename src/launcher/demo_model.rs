//! Demo checkpoint, which is embedded in the executable so that `hadron serve` works without a model.

use std::fs::{self, DirBuilder};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Served name of the demo model.
pub const NAME: &str = "hadron-demo";

macro_rules! file {
    ($name:literal) => {
        ($name, include_bytes!(concat!("../../tests/data/demo/", $name)) as &[u8])
    };
}

const FILES: &[(&str, &[u8])] = &[
    file!("config.json"),
    file!("generation_config.json"),
    file!("model.safetensors"),
    file!("tokenizer.json"),
    file!("tokenizer_config.json"),
];

/// The demo model could not be written to the folder for temporary files.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot unpack the demo model into {} ({bytes} bytes): {source}; {}",
    path.display(),
    advice(source.kind())
)]
/// Error when the files of the demo model cannot be written to disk.
pub struct DemoModelUnpackError {
    /// Folder or file that could not be written.
    pub path: PathBuf,
    /// Total bytes of the files of the demo model.
    pub bytes: usize,
    /// Error of the operating system.
    pub source: io::Error,
}

/// Returns advice for the operator, which is part of the message of `DemoModelUnpackError`.
fn advice(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free space there, or set TMPDIR to a folder on another disk"
        }
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            "create the folder, or set TMPDIR to one that exists"
        }
        _ => "set TMPDIR to a folder that this user may write, or name a model to serve",
    }
}

/// Folder with the files of the demo model. It is private to this process, and removed on drop.
#[derive(Debug)]
pub struct UnpackedDemoModel {
    dir: PathBuf,
}

impl UnpackedDemoModel {
    /// Writes the files of the demo model to a new folder in the system's temporary folder.
    ///
    /// Errors: the folder cannot be created, or a file cannot be written. Partly written files are removed.
    pub fn new() -> Result<Self, DemoModelUnpackError> {
        Self::in_parent(&std::env::temp_dir())
    }

    /// Writes the files of the demo model to a new folder in `parent`.
    fn in_parent(parent: &Path) -> Result<Self, DemoModelUnpackError> {
        let failed = |path: &Path, source| DemoModelUnpackError {
            path: path.to_owned(),
            bytes: FILES.iter().map(|(_, bytes)| bytes.len()).sum(),
            source,
        };
        let random = RandomState::new().hash_one(std::process::id());
        let dir = parent.join(format!("hadron-demo-{random:016x}"));
        let created = DirBuilder::new().mode(0o700).create(&dir);
        created.map_err(|source| failed(&dir, source))?;
        let unpacked = Self { dir };
        for (name, bytes) in FILES {
            let path = unpacked.dir.join(name);
            fs::write(&path, bytes).map_err(|source| failed(&path, source))?;
        }
        Ok(unpacked)
    }

    /// Returns the folder with the files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for UnpackedDemoModel {
    fn drop(&mut self) {
        // Memory-mapped files stay readable. If the folder cannot be removed, the system's cleanup of
        // temporary files removes it.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpack_error_names_folder_reason_and_advice() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing");
        let error = UnpackedDemoModel::in_parent(&missing).unwrap_err();
        let message = error.to_string();
        assert!(message.contains(&*missing.to_string_lossy()), "{message}");
        assert!(message.contains("No such file or directory"), "{message}");
        assert!(
            message.ends_with("create the folder, or set TMPDIR to one that exists"),
            "{message}"
        );

        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(
            UnpackedDemoModel::in_parent(&file).unwrap_err().source.kind(),
            io::ErrorKind::NotADirectory
        );
    }

    #[test]
    fn full_and_read_only_disks_get_their_own_advice() {
        let full = io::Error::from_raw_os_error(28); // ENOSPC
        assert!(advice(full.kind()).starts_with("free space there"));
        let read_only = io::Error::from_raw_os_error(30); // EROFS
        assert!(advice(read_only.kind()).contains("may write"));
    }
}
