//! Read-only memory mapping of a file.
//!
//! The module is part of this crate because memory mapping needs unsafe code: the bytes change if another
//! process writes to the file, and reading past the end of a truncated file raises SIGBUS. A program cannot
//! prevent this, so model folders must not be modified while a model is served.

use memmap2::{Advice, Mmap};
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

/// Content of a file that is mapped into memory for reading.
#[derive(Debug)]
pub struct MappedFile {
    map: Option<Mmap>, // `None` for an empty file, which cannot be mapped.
}

impl MappedFile {
    /// Maps a regular file into memory without reading it.
    ///
    /// Errors: the file cannot be opened or mapped, or is not a regular file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        if metadata.len() == 0 {
            return Ok(Self { map: None });
        }
        // SAFETY: the mapping is read-only and owned by this value; the module documentation states that the
        // file must not be modified by other writers.
        let map = unsafe { Mmap::map(&file)? };
        // Weights are read once, sequentially. The advice only affects read-ahead, so failures are ignored.
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
