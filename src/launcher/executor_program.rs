//! The program of an executor's process: this binary, whose log passes through the server's.

use super::child_process::OWN_BINARY;
use crate::config::{LogFormat, SECRET_VARIABLE};
use crate::log::LogWriter;
use engine::ExecutorProgram;

/// What a server starts.
pub(super) fn program(log: LogFormat) -> ExecutorProgram {
    ExecutorProgram {
        path: OWN_BINARY,
        log_format: log.name(),
        secret_variable: SECRET_VARIABLE,
        open_log: || Box::new(LogWriter::default()),
    }
}
