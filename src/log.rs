//! Where lines of the log go: stderr, for as long as somebody takes them.
//!
//! A reader that has stopped, a full disk or a closed pipe costs lines, which are counted, and never the thread that
//! has something to say: it may be the one that decides steps.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::{self, OpenOptions};
use std::io::{self, StderrLock, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use tracing_subscriber::fmt::MakeWriter;

/// What a pipe that is said to be writable takes without waiting (POSIX, `PIPE_BUF`).
const PIECE_BYTES: usize = 4_096;
/// How long a reader that has kept up so far is waited for.
const READER_WAIT_MS: i64 = 20;

/// The log's end of stderr; clones share it.
#[derive(Debug, Clone, Default)]
pub struct LogWriter {
    state: Arc<Mutex<LogWriterState>>,
}

#[derive(Debug, Default)]
struct LogWriterState {
    /// Lines that nobody took, since the last word about it.
    dropped_lines: u64,
    /// Whether the last line was lost: then nobody waits for the reader.
    last_line_dropped: bool,
    /// Whether the last line stopped before its end.
    last_line_truncated: bool,
}

impl LogWriterState {
    /// Writes one line or loses it. Returns how many were lost before, if it could be written.
    fn write_or_drop(&mut self, line: &[u8], stderr: &mut StderrLock<'_>) -> u64 {
        let end: &[u8] = if self.last_line_truncated { b"\n" } else { b"" };
        let mut begun = false;
        let done = [end, line].into_iter().flat_map(|part| part.chunks(PIECE_BYTES)).all(|piece| {
            let written = self.has_room(stderr) && stderr.write_all(piece).is_ok();
            begun |= written;
            written
        });
        self.last_line_dropped = !done;
        if done {
            self.last_line_truncated = false;
            return std::mem::take(&mut self.dropped_lines);
        }
        self.last_line_truncated |= begun;
        self.dropped_lines += 1;
        0
    }

    /// Whether a piece can be written, or written in vain, without waiting.
    fn has_room(&self, stderr: &StderrLock<'_>) -> bool {
        let patience_ms = if self.last_line_dropped { 0 } else { READER_WAIT_MS };
        let patience = Timespec { tv_sec: 0, tv_nsec: patience_ms * 1_000_000 };
        let mut watched = [PollFd::new(stderr, PollFlags::OUT)];
        poll(&mut watched, Some(&patience)).is_ok_and(|ready| ready > 0)
    }
}

impl LogWriter {
    /// Writes a line that is no event.
    pub fn write_plain_line(&mut self, line: &str) {
        // It is written or lost, never refused.
        let _ = self.write(format!("{line}\n").as_bytes());
    }
}

impl Write for LogWriter {
    /// Takes a whole line, always.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // Held while it is looked and written: nobody else takes the room in between.
        let lost = state.write_or_drop(line, &mut io::stderr().lock());
        drop(state);
        if lost > 0 {
            tracing::warn!(lines = lost, "nobody took these lines of the log: they are lost");
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Other crates of the server: a filter that names `hadron` covers them too.
const FRONT_CRATES: [&str; 5] = ["grammar", "text", "metrics", "engine", "server"];

/// A filter in which `hadron=LEVEL` covers the crates of the server, and `hadron::CRATE=LEVEL` the crate. Directives of
/// the filter itself come last, so they win.
pub fn cover_front_crates(filter: &str) -> String {
    let mut directives = Vec::new();
    for directive in filter.split(',') {
        let target = directive.find(['=', '[']).unwrap_or(directive.len());
        let (target, level) = directive.split_at(target);
        let path = match target.trim().strip_prefix("hadron") {
            Some("") => {
                directives.extend(FRONT_CRATES.map(|name| format!("{name}{level}")));
                continue;
            }
            Some(path) => path.strip_prefix("::").unwrap_or_default(),
            None => continue,
        };
        if path.split("::").next().is_some_and(|name| FRONT_CRATES.contains(&name)) {
            directives.push(format!("{path}{level}"));
        }
    }
    directives.push(filter.to_owned());
    directives.join(",")
}

/// What stderr is a link to, for every process.
const STDERR_LINK: &str = "/proc/self/fd/2";

/// The file that stderr is, where it was redirected into one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFile {
    path: PathBuf,
}

impl LogFile {
    /// The file; `None` where stderr is a terminal, a pipe or a socket, which have nothing to rotate.
    pub fn of_stderr() -> Option<Self> {
        let is_file = fs::metadata(STDERR_LINK).is_ok_and(|stderr| stderr.is_file());
        let path = fs::read_link(STDERR_LINK).ok().filter(|_| is_file)?;
        Some(Self { path })
    }

    /// Opens the file by its name again and makes it stderr: the former one may have been moved away.
    ///
    /// Errors: it cannot be opened; stderr is what it was.
    pub fn reopen(&self) -> io::Result<()> {
        let file = OpenOptions::new().append(true).create(true).open(&self.path)?;
        Ok(rustix::stdio::dup2_stderr(file)?)
    }
}

impl MakeWriter<'_> for LogWriter {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_of_hadron_cover_the_crates_of_the_server() {
        assert_eq!(cover_front_crates("info"), "info");
        assert_eq!(
            cover_front_crates("info,hadron=debug"),
            "grammar=debug,text=debug,metrics=debug,engine=debug,server=debug,info,hadron=debug"
        );
        assert_eq!(
            cover_front_crates("hadron::server::sse[request]=trace,hadron::launcher=warn"),
            "server::sse[request]=trace,hadron::server::sse[request]=trace,hadron::launcher=warn"
        );
        for other in ["hadron_x=debug", "executor=debug", ""] {
            assert_eq!(cover_front_crates(other), other);
        }
    }
}
