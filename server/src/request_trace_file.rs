//! File of `--trace-requests`. Failed writes leave only complete lines in the file.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Error: lines that could not be written to the trace file.
#[derive(Debug, thiserror::Error)]
#[error("{lines} lines were not written: {cause}")]
pub(super) struct TraceWriteError {
    /// Number of lines that were not written.
    pub(super) lines: u64,
    /// I/O error of the write.
    pub(super) cause: io::Error,
}

/// Trace file to which lines are appended.
#[derive(Debug)]
pub(super) struct RequestTraceFile {
    path: PathBuf,
    file: File,
    /// Whether the file ends with an incomplete line that could not be truncated.
    is_torn: bool,
}

impl RequestTraceFile {
    /// Opens the trace file for appending. If its last line is incomplete, as after a crash, a newline is
    /// written before the next line.
    ///
    /// Errors: the file cannot be opened.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = Self::append_to(path)?;
        let is_torn = has_torn_line(path).unwrap_or(false); // The path may be a pipe or not readable.
        Ok(Self { path: path.to_owned(), file, is_torn })
    }

    fn append_to(path: &Path) -> io::Result<File> {
        OpenOptions::new().append(true).create(true).open(path)
    }

    /// Reopens the trace file under its name.
    ///
    /// Errors: the file cannot be opened; the file opened before remains in use.
    pub(super) fn reopen(&mut self) -> io::Result<()> {
        *self = Self::open(&self.path)?;
        Ok(())
    }

    /// Appends `lines`; each line ends with a newline.
    ///
    /// Errors: the number of lines that were not written. All earlier lines are completely in the file.
    pub(super) fn write_lines(&mut self, lines: &[u8]) -> Result<(), TraceWriteError> {
        if lines.is_empty() {
            return Ok(());
        }
        if self.is_torn {
            // Ends the incomplete line at the end of the file.
            self.append(b"\n").map_err(|failure| failure.into_unwritten(lines))?;
            self.is_torn = false;
        }
        let Err(failure) = self.append(lines) else { return Ok(()) };
        let complete_bytes = lines[..failure.written].iter().rposition(|&byte| byte == b'\n');
        let complete_bytes = complete_bytes.map_or(0, |last| last + 1);
        let partial_bytes = failure.written - complete_bytes;
        if partial_bytes > 0 {
            self.is_torn = self.truncate_by(partial_bytes).is_err();
        }
        Err(failure.into_unwritten(&lines[complete_bytes..]))
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), PartialWriteError> {
        let mut written = 0;
        while written < bytes.len() {
            let cause = match self.file.write(&bytes[written..]) {
                Ok(0) => ErrorKind::WriteZero.into(),
                Ok(count) => {
                    written += count;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => error,
            };
            return Err(PartialWriteError { written, cause });
        }
        Ok(())
    }

    /// Removes the last `bytes` bytes of the file.
    fn truncate_by(&self, bytes: usize) -> io::Result<()> {
        let metadata = self.file.metadata()?;
        if !metadata.is_file() {
            return Err(ErrorKind::Unsupported.into());
        }
        self.file.set_len(metadata.len().saturating_sub(bytes as u64))
    }
}

/// Whether the file at `path` ends with an incomplete line; false for pipes and other special files.
fn has_torn_line(path: &Path) -> io::Result<bool> {
    if !path.metadata()?.is_file() {
        return Ok(false);
    }
    let mut file = File::open(path)?;
    if file.seek(SeekFrom::End(0))? == 0 {
        return Ok(false);
    }
    file.seek(SeekFrom::End(-1))?;
    let mut last = [0];
    file.read_exact(&mut last)?;
    Ok(last != *b"\n")
}

/// Error of a write that failed after a part of the bytes was written.
struct PartialWriteError {
    written: usize,
    cause: io::Error,
}

impl PartialWriteError {
    /// Returns an error that counts all `lines` as not written.
    fn into_unwritten(self, lines: &[u8]) -> TraceWriteError {
        let lines = lines.split_inclusive(|&byte| byte == b'\n').count() as u64;
        TraceWriteError { lines, cause: self.cause }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::AsRawFd;

    #[test]
    fn full_disk_drops_whole_lines_and_counts_them() {
        let mut full = RequestTraceFile::open(Path::new("/dev/full")).unwrap();
        let unwritten = full.write_lines(b"a\nb\nc\n").unwrap_err();
        assert_eq!(unwritten.lines, 3);
        assert_eq!(unwritten.cause.kind(), ErrorKind::StorageFull);
        assert!(full.write_lines(b"").is_ok());
    }

    #[test]
    fn torn_line_is_truncated_in_file_and_ended_in_pipe() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        fs::write(&path, "whole\nto").unwrap();
        let file = RequestTraceFile::open(&path).unwrap();
        file.truncate_by(2).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "whole\n");

        let (mut reader, writer) = io::pipe().unwrap();
        let named = format!("/proc/self/fd/{}", writer.as_raw_fd());
        let mut pipe = RequestTraceFile::open(Path::new(&named)).unwrap();
        assert!(pipe.truncate_by(1).is_err());
        pipe.is_torn = true;
        pipe.write_lines(b"next\n").unwrap();
        drop((pipe, writer));
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "\nnext\n");
    }

    #[test]
    fn torn_line_of_a_file_is_ended_when_it_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        for (before, after) in [("", "1\n"), ("a\n", "a\n1\n"), ("a\nb", "a\nb\n1\n")] {
            fs::write(&path, before).unwrap();
            RequestTraceFile::open(&path).unwrap().write_lines(b"1\n").unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), after);
        }
    }

    #[test]
    fn moved_trace_file_is_reopened_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let (path, moved) = (folder.path().join("trace"), folder.path().join("trace.1"));
        let mut file = RequestTraceFile::open(&path).unwrap();
        file.write_lines(b"1\n").unwrap();
        fs::rename(&path, &moved).unwrap();
        file.write_lines(b"2\n").unwrap();
        file.reopen().unwrap();
        file.write_lines(b"3\n").unwrap();
        assert_eq!(fs::read_to_string(&moved).unwrap(), "1\n2\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "3\n");
    }
}
