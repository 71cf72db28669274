//! Command with which the server starts executor processes, and the writer for the log lines of these
//! processes.

use super::child_process::OWN_BINARY;
use crate::config::{LogFormat, SECRET_VARIABLE};
use crate::log::LogWriter;
use engine::ExecutorProgram;

/// Returns the program for executor processes: the running executable. The server writes the log lines of
/// executors to its own log.
pub(super) fn program(log: LogFormat) -> ExecutorProgram {
    ExecutorProgram {
        path: OWN_BINARY,
        log_format: log.name(),
        secret_variable: SECRET_VARIABLE,
        open_log: || Box::new(LogWriter::default()),
    }
}
