//! Memory that the processes of one host share.
//!
//! It lives here because mapping is unsafe. Every access is atomic, so that the words are values
//! whatever another process does to them; what they mean is settled among those who share them.

use memmap2::{MmapOptions, MmapRaw};
use std::fs::File;
use std::io;
use std::sync::atomic::AtomicU32;

/// Words of a file, mapped by all who share it.
#[derive(Debug)]
pub struct SharedMemory {
    map: MmapRaw,
}

impl SharedMemory {
    /// Maps the first `words` words of a file. Whoever shares the file must not shorten it: reading behind its end
    /// kills the process.
    ///
    /// Errors: the file is shorter, or cannot be mapped to read and write.
    pub fn map(file: &File, words: usize) -> io::Result<Self> {
        let (bytes, found) = (words * size_of::<AtomicU32>(), file.metadata()?.len());
        if found < bytes as u64 {
            let text = format!("{found} bytes, {bytes} are needed");
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
        }
        Ok(Self { map: MmapOptions::new().len(bytes).map_raw(file)? })
    }

    /// The words, as all see them.
    #[must_use]
    pub fn words(&self) -> &[AtomicU32] {
        let count = self.map.len() / size_of::<AtomicU32>();
        // SAFETY: the mapping starts at a page, is that long, and can be read and written for as long as `self`
        // lives; atomics may be written by others.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), count) }
    }
}
