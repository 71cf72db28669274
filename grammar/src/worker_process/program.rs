//! Command line of a worker process.

use std::ffi::OsString;
use std::path::PathBuf;

/// Executable of a worker process, its arguments, and an environment variable that it does not inherit.
#[derive(Debug, Clone)]
pub struct WorkerProgram {
    /// Path of the `hadron` executable that is started.
    pub path: PathBuf,
    /// Arguments: the subcommand and the log settings.
    pub args: Vec<OsString>,
    /// Name of the environment variable with a secret of the server; it is removed from the environment of
    /// the process.
    pub secret_variable: &'static str,
}
