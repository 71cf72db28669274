//! Program of an executor process: this binary, with a log that is written through the server.

use super::child_process::OWN_BINARY;
use crate::config::{LogFormat, SECRET_VARIABLE};
use crate::log::LogWriter;
use engine::ExecutorProgram;

/// Returns the program of executor processes.
pub(super) fn program(log: LogFormat) -> ExecutorProgram {
    ExecutorProgram {
        path: OWN_BINARY,
        log_format: log.name(),
        secret_variable: SECRET_VARIABLE,
        open_log: || Box::new(LogWriter::default()),
    }
}
