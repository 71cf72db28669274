//! Memory that is shared by several processes of a host.
//!
//! The module is part of this crate because memory mapping needs unsafe code. Every access is atomic, so that
//! concurrent writes by other processes are not data races. The meaning of the words is defined by the users
//! of this module.

use memmap2::{MmapOptions, MmapRaw};
use std::fs::File;
use std::io;
use std::sync::atomic::AtomicU32;

/// 32-bit words of a file that several processes have mapped into memory.
#[derive(Debug)]
pub struct HostSharedMemory {
    map: MmapRaw,
}

impl HostSharedMemory {
    /// Maps the first `words` words of a file. No process may truncate the file, because an access past the
    /// end of the file raises SIGBUS.
    ///
    /// Errors: the file is too short, or cannot be mapped for reading and writing.
    pub fn map(file: &File, words: usize) -> io::Result<Self> {
        let (bytes, found) = (words * size_of::<AtomicU32>(), file.metadata()?.len());
        if found < bytes as u64 {
            let text = format!("the file has {found} bytes, {bytes} are required");
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
        }
        Ok(Self { map: MmapOptions::new().len(bytes).map_raw(file)? })
    }

    /// Returns all words of the shared memory.
    #[must_use]
    pub fn words(&self) -> &[AtomicU32] {
        let count = self.map.len() / size_of::<AtomicU32>();
        // SAFETY: the mapping is page-aligned, has `count` words, and is readable and writable while `self`
        // lives; atomics may be written concurrently.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), count) }
    }
}
