//! Log output on stderr, and reopening of log files.
//!
//! The thread that writes a log line may be the scheduler thread, so a write waits for a slow reader of
//! stderr for at most `READER_TIMEOUT_MS` per `CHUNK_BYTES`. If the reader does not read, the disk is full or
//! the pipe is closed, log lines are dropped and counted.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::{self, OpenOptions};
use std::io::{self, StderrLock, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use tracing_subscriber::fmt::MakeWriter;

/// Maximum bytes of one write: a writable pipe accepts this number without blocking (POSIX, `PIPE_BUF`).
const CHUNK_BYTES: usize = 4_096;
/// Maximum time in milliseconds for which a write waits for a slow reader of stderr. If the last line was
/// dropped, a write does not wait.
const READER_TIMEOUT_MS: i64 = 20;

/// Writer of log lines to stderr. Clones share their state.
#[derive(Debug, Clone, Default)]
pub struct LogWriter {
    state: Arc<Mutex<LogWriterState>>,
}

/// State that all clones of a log writer share.
#[derive(Debug, Default)]
struct LogWriterState {
    /// Number of lines that were dropped since the number was last logged.
    dropped_lines: u64,
    /// Whether the last line was dropped. In that case the next write does not wait for the reader.
    last_line_dropped: bool,
    /// Whether the last written line is incomplete. In that case the next write starts with a line end.
    last_line_truncated: bool,
}

impl LogWriterState {
    /// Writes or drops one line. Returns the number of lines that were dropped before it, or 0 if this line
    /// is dropped too.
    fn write_or_drop(&mut self, line: &[u8], stderr: &mut StderrLock<'_>) -> u64 {
        let separator: &[u8] = if self.last_line_truncated { b"\n" } else { b"" };
        let mut partially_written = false;
        let is_complete =
            [separator, line].into_iter().flat_map(|part| part.chunks(CHUNK_BYTES)).all(|chunk| {
                let written = self.is_writable(stderr) && stderr.write_all(chunk).is_ok();
                partially_written |= written;
                written
            });
        self.last_line_dropped = !is_complete;
        if is_complete {
            self.last_line_truncated = false;
            return std::mem::take(&mut self.dropped_lines);
        }
        self.last_line_truncated |= partially_written;
        self.dropped_lines += 1;
        0
    }

    /// Waits until stderr accepts a write, for at most `READER_TIMEOUT_MS`, or not at all if the last line
    /// was dropped. Returns true if a write would now return immediately (also with an error).
    fn is_writable(&self, stderr: &StderrLock<'_>) -> bool {
        let timeout_ms = if self.last_line_dropped { 0 } else { READER_TIMEOUT_MS };
        let timeout = Timespec { tv_sec: 0, tv_nsec: timeout_ms * 1_000_000 };
        let mut poll_fds = [PollFd::new(stderr, PollFlags::OUT)];
        poll(&mut poll_fds, Some(&timeout)).is_ok_and(|ready| ready > 0)
    }
}

impl LogWriter {
    /// Writes a line of plain text, without the time and level of log events.
    pub fn write_plain_line(&mut self, line: &str) {
        // `write` never returns an error.
        let _ = self.write(format!("{line}\n").as_bytes());
    }
}

impl Write for LogWriter {
    /// Writes or drops a whole line. Never returns an error.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // The stderr lock is held from the poll to the write, so that no other thread can fill the pipe in
        // between.
        let dropped = state.write_or_drop(line, &mut io::stderr().lock());
        drop(state);
        if dropped > 0 {
            tracing::warn!(lines = dropped, "log lines were dropped");
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Crates of the server to which a `RUST_LOG` filter for `hadron` also applies.
const SERVER_CRATES: [&str; 5] = ["grammar", "text", "metrics", "engine", "server"];

/// Expands a log filter: `hadron=LEVEL` applies to all crates of the server, and `hadron::CRATE=LEVEL` to one
/// crate. The directives of the original filter come last, so they take precedence.
pub fn expand_hadron_filter(filter: &str) -> String {
    let mut directives = Vec::new();
    let mut depth = 0_usize;
    let outside_fields = |c: char| {
        depth = match c {
            '[' | '{' => depth + 1,
            ']' | '}' => depth.saturating_sub(1),
            _ => depth,
        };
        c == ',' && depth == 0
    };
    for directive in filter.split(outside_fields) {
        let target = directive.find(['=', '[']).unwrap_or(directive.len());
        let (target, level) = directive.split_at(target);
        let path = match target.trim().strip_prefix("hadron") {
            Some("") => {
                directives.extend(SERVER_CRATES.map(|name| format!("{name}{level}")));
                continue;
            }
            Some(path) => path.strip_prefix("::").unwrap_or_default(),
            None => continue,
        };
        if path.split("::").next().is_some_and(|name| SERVER_CRATES.contains(&name)) {
            directives.push(format!("{path}{level}"));
        }
    }
    directives.push(filter.to_owned());
    directives.join(",")
}

/// Symbolic link to the file that stderr is redirected to, in every process.
const STDERR_LINK: &str = "/proc/self/fd/2";

/// Log file to which stderr is redirected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFile {
    path: PathBuf,
}

impl LogFile {
    /// Returns the log file; `None` if stderr is a terminal, a pipe or a socket, which cannot be rotated.
    pub fn of_stderr() -> Option<Self> {
        let is_file = fs::metadata(STDERR_LINK).is_ok_and(|stderr| stderr.is_file());
        let path = fs::read_link(STDERR_LINK).ok().filter(|_| is_file)?;
        Some(Self { path })
    }

    /// Opens the file by its name and redirects stderr to it, because log rotation may have moved the old
    /// file.
    ///
    /// Errors: the file cannot be opened; stderr is unchanged.
    pub fn reopen(&self) -> io::Result<()> {
        let file = OpenOptions::new().append(true).create(true).open(&self.path)?;
        Ok(rustix::stdio::dup2_stderr(file)?)
    }
}

impl MakeWriter<'_> for LogWriter {
    /// Type of the writer for one log line: a clone of the `LogWriter`.
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hadron_filters_cover_all_server_crates() {
        assert_eq!(expand_hadron_filter("info"), "info");
        assert_eq!(
            expand_hadron_filter("info,hadron=debug"),
            "grammar=debug,text=debug,metrics=debug,engine=debug,server=debug,info,hadron=debug"
        );
        assert_eq!(
            expand_hadron_filter("hadron::server::sse[request]=trace,hadron::launcher=warn"),
            "server::sse[request]=trace,hadron::server::sse[request]=trace,hadron::launcher=warn"
        );
        assert_eq!(
            expand_hadron_filter("hadron[request{id=1,hadron=x}]=trace"),
            "grammar[request{id=1,hadron=x}]=trace,text[request{id=1,hadron=x}]=trace,\
             metrics[request{id=1,hadron=x}]=trace,engine[request{id=1,hadron=x}]=trace,\
             server[request{id=1,hadron=x}]=trace,hadron[request{id=1,hadron=x}]=trace"
        );
        for other in ["hadron_x=debug", "executor=debug", ""] {
            assert_eq!(expand_hadron_filter(other), other);
        }
    }
}
