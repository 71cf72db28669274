//! A file of trace events in Chrome's JSON, complete after every write.
//!
//! Each write ends in the closing brackets, which the next one overwrites: whatever ends the process, what
//! is on disk parses, and holds all but the last moments.

use std::fs::{File, create_dir_all};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// What closes a file.
const END: &str = "\n]}\n";
/// Events are written once so many bytes have come together.
const BUFFER_BYTES: usize = 64 << 10;
/// Files of one folder and rank.
const FILES_MAX: u32 = 100_000;

/// A trace under way.
#[derive(Debug)]
pub(super) struct ChromeTraceFile {
    file: File,
    path: PathBuf,
    /// Where the closing brackets begin.
    at: u64,
    buffer: String,
    bytes_max: u64,
    is_empty: bool,
}

impl ChromeTraceFile {
    /// A new file in `folder`, which is made if need be; others are left alone. `head` is a JSON object of
    /// facts about the trace.
    pub(super) fn create(folder: &Path, rank: u16, head: &str, bytes_max: u64) -> io::Result<Self> {
        create_dir_all(folder)?;
        let (file, path) = first_free(folder, rank)?;
        let head = format!("{{\"displayTimeUnit\":\"ns\",\"otherData\":{head},\"traceEvents\":[");
        let (at, buffer) = (0, head);
        let mut new = Self { file, path, at, buffer, bytes_max, is_empty: true };
        new.flush()?;
        Ok(new)
    }

    /// Where it lies.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends an event, a JSON object. Returns false once the file is as long as it may become, and the
    /// event is left out.
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

    /// Writes what has been appended.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        let written = self.buffer.len();
        self.buffer.push_str(END);
        self.file.write_all_at(self.buffer.as_bytes(), self.at)?;
        self.at += written as u64;
        self.buffer.clear();
        Ok(())
    }
}

/// The first `rankR-N.json` that does not exist.
fn first_free(folder: &Path, rank: u16) -> io::Result<(File, PathBuf)> {
    for n in 1..=FILES_MAX {
        let path = folder.join(format!("rank{rank}-{n}.json"));
        match File::create_new(&path) {
            Ok(file) => return Ok((file, path)),
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
    fn the_file_is_closed_after_every_write() {
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
    fn it_does_not_grow_for_ever() {
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
