//! The program of a worker process.

use std::ffi::OsString;
use std::path::PathBuf;

/// A binary and its arguments.
#[derive(Debug, Clone)]
pub struct WorkerProgram {
    /// The binary: this build.
    pub path: PathBuf,
    /// Its arguments: the role, and how it logs.
    pub args: Vec<OsString>,
}
