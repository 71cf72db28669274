//! Program of a worker process.

use std::ffi::OsString;
use std::path::PathBuf;

/// Binary of a worker process, its arguments, and a variable that it does not inherit.
#[derive(Debug, Clone)]
pub struct WorkerProgram {
    /// Path of the binary: this build.
    pub path: PathBuf,
    /// Arguments: the subcommand and the log settings.
    pub args: Vec<OsString>,
    /// Environment variable with a secret of the server, removed from the environment of the process.
    pub secret_variable: &'static str,
}
