//! Command line of a worker process.

use std::ffi::OsString;
use std::path::PathBuf;

/// Executable of a worker process, its arguments, and an environment variable that must not be inherited.
#[derive(Debug, Clone)]
pub struct WorkerProgram {
    /// Path of the `hadron` executable.
    pub path: PathBuf,
    /// Arguments: the subcommand and the log settings.
    pub args: Vec<OsString>,
    /// Name of an environment variable that contains a secret of the server; it is removed from the
    /// environment of the worker process.
    pub secret_variable: &'static str,
}
