//! A file in memory, read-only, through the page cache.
//!
//! It lives here because mapping is unsafe: the bytes change if someone writes to the file, and
//! reading behind a truncation kills the process. Both are outside what a program can prevent, so
//! model folders must not be written while they are served.

use memmap2::{Advice, Mmap};
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

/// The bytes of a file.
#[derive(Debug)]
pub struct MappedFile {
    map: Option<Mmap>, // None for an empty file, which cannot be mapped.
}

impl MappedFile {
    /// Maps a regular file; nothing is read yet.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        if metadata.len() == 0 {
            return Ok(Self { map: None });
        }
        // SAFETY: read-only and private to this value; see the head of this file for what the caller
        // promises about other writers.
        let map = unsafe { Mmap::map(&file)? };
        // Read-ahead is a hint: weights are read once, front to back.
        let _ = map.advise(Advice::Sequential);
        Ok(Self { map: Some(map) })
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}
