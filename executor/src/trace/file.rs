//! Trace file in Chrome's JSON trace event format. It is valid JSON after every write.
//!
//! Each write ends with the closing brackets, which the next write overwrites. If the process ends at any
//! time, the file is valid JSON, and only the events since the last write are missing.

use std::fs::{File, create_dir_all};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Closing brackets of the JSON file, with which every write ends.
const END: &str = "\n]}\n";
/// Number of buffered bytes after which events are written to the file.
const BUFFER_BYTES: usize = 64 << 10;
/// Maximum number of trace files per folder and rank.
const FILES_MAX: u32 = 100_000;

/// A trace file that is being written.
#[derive(Debug)]
pub(super) struct ChromeTraceFile {
    file: File,
    path: PathBuf,
    /// Byte offset of the closing brackets in the file.
    at: u64,
    buffer: String,
    bytes_max: u64,
    is_empty: bool,
}

impl ChromeTraceFile {
    /// Creates a new file in `folder`, and creates the folder if needed; existing files are not changed.
    /// `head` is the trace metadata as a JSON object.
    pub(super) fn create(folder: &Path, rank: u16, head: &str, bytes_max: u64) -> io::Result<Self> {
        create_dir_all(folder)?;
        let TraceFileHandle { file, path } = create_numbered(folder, rank)?;
        let head = format!("{{\"displayTimeUnit\":\"ns\",\"otherData\":{head},\"traceEvents\":[");
        let (at, buffer) = (0, head);
        let mut new = Self { file, path, at, buffer, bytes_max, is_empty: true };
        new.flush()?;
        Ok(new)
    }

    /// Path of the trace file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends an event, given as a JSON object. Returns false, without appending, if the file would exceed
    /// its maximum size.
    pub(super) fn push(&mut self, event: &str) -> io::Result<bool> {
        let bytes = self.at + (self.buffer.len() + event.len() + END.len() + 2) as u64;
        if bytes > self.bytes_max {
            return Ok(false);
        }
        self.buffer.push_str(if self.is_empty { "\n" } else { ",\n" });
        self.buffer.push_str(event);
        self.is_empty = false;
        if self.buffer.len() >= BUFFER_BYTES {
            self.flush()?;
        }
        Ok(true)
    }

    /// Writes the buffered events to the file.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        let written = self.buffer.len();
        self.buffer.push_str(END);
        self.file.write_all_at(self.buffer.as_bytes(), self.at)?;
        self.at += written as u64;
        self.buffer.clear();
        Ok(())
    }
}

/// A new, empty trace file.
struct TraceFileHandle {
    file: File,
    path: PathBuf,
}

/// Creates the first file `rankR-N.json` (R = rank, N = 1, 2, ...) that does not exist.
fn create_numbered(folder: &Path, rank: u16) -> io::Result<TraceFileHandle> {
    for n in 1..=FILES_MAX {
        let path = folder.join(format!("rank{rank}-{n}.json"));
        match File::create_new(&path) {
            Ok(file) => return Ok(TraceFileHandle { file, path }),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other(format!("{FILES_MAX} traces in {}", folder.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("hadron-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn file_parses_after_every_write() {
        let folder = folder("closed");
        let mut file = ChromeTraceFile::create(&folder, 3, "{}", 1 << 20).unwrap();
        let read = |file: &ChromeTraceFile| fs::read_to_string(file.path()).unwrap();
        let head = r#"{"displayTimeUnit":"ns","otherData":{},"traceEvents":["#;
        assert_eq!(read(&file), format!("{head}\n]}}\n"));
        for n in 1..=2 {
            assert!(file.push(&format!("{{\"n\":{n}}}")).unwrap());
            file.flush().unwrap();
        }
        assert_eq!(read(&file), format!("{head}\n{{\"n\":1}},\n{{\"n\":2}}\n]}}\n"));
        let next = ChromeTraceFile::create(&folder, 3, "{}", 1 << 20).unwrap();
        assert_eq!(next.path(), folder.join("rank3-2.json"));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn file_size_is_bounded() {
        let folder = folder("bounded");
        let mut file = ChromeTraceFile::create(&folder, 0, "{}", 4_000).unwrap();
        let taken = (0..1_000).filter(|n| file.push(&format!("{{\"n\":{n}}}")).unwrap()).count();
        file.flush().unwrap();
        let text = fs::read_to_string(file.path()).unwrap();
        assert!(taken > 300 && taken < 1_000 && text.len() <= 4_000, "{taken}, {}", text.len());
        assert!(text.ends_with("}\n]}\n"));
        fs::remove_dir_all(folder).unwrap();
    }
}
