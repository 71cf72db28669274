//! The program of a worker process.

use std::ffi::OsString;
use std::path::PathBuf;

/// A binary, its arguments, and what it does not inherit.
#[derive(Debug, Clone)]
pub struct WorkerProgram {
    /// The binary: this build.
    pub path: PathBuf,
    /// Its arguments: the role, and how it logs.
    pub args: Vec<OsString>,
    /// Environment variable that holds a secret of the server, which the process does not inherit.
    pub secret_variable: &'static str,
}
