//! Shared memory through which the ranks of one host communicate. The process that starts the ranks creates
//! the memory, and each rank maps it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use device::HostSharedMemory;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use crate::peer_waiter::PeerWaiter;
use crate::shared_layout::{
    CALL_HISTORY_LEN, GroupMemoryLayout, HEADER_WORDS, RankFlag, group_layouts,
};
use crate::{CollectiveCall, CollectiveError, SharedMemoryGroup};

/// First word of the shared memory, which identifies the memory as shared memory of Hadron. The second word
/// is the layout version, and the third word is the number of words.
const MAGIC: u32 = u32::from_le_bytes(*b"HDRN");
const LAYOUT_VERSION: u32 = 2;
/// Value of the abort flag after the creator of a group has aborted the group. If a rank aborts the group,
/// the value is the index of the failed rank plus one.
pub(crate) const ABORTED_BY_CREATOR: u32 = u32::MAX;

/// Shared memory of all groups of ranks that one process has started. If the ranks are restarted, new shared
/// memory is created. The memory is freed after the last process has unmapped it.
#[derive(Debug)]
pub struct SharedMemoryRendezvous {
    file: File,
    path: PathBuf,
    memory: Arc<HostSharedMemory>,
    layouts: Vec<GroupMemoryLayout>,
}

impl SharedMemoryRendezvous {
    /// Creates shared memory for several groups, which no rank has joined yet. `sizes` contains the number of
    /// ranks of each group.
    pub fn create(sizes: &[usize]) -> Result<Self, CollectiveError> {
        let layouts = group_layouts(sizes);
        let words = layouts.last().map_or(HEADER_WORDS, |layout| layout.words().end);
        let create = || -> io::Result<(File, HostSharedMemory)> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = File::from(memfd_create("hadron-rendezvous", flags)?);
            file.set_len(words as u64 * 4)?;
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            let memory = HostSharedMemory::map(&file, words)?;
            Ok((file, memory))
        };
        let (file, memory) = create().map_err(|error| memory_error(Path::new("memfd"), &error))?;
        for (word, value) in memory.words().iter().zip([MAGIC, LAYOUT_VERSION, words as u32]) {
            word.store(value, SeqCst);
        }
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into();
        Ok(Self { file, path, memory: Arc::new(memory), layouts })
    }

    /// Maps shared memory that another process has created for groups of the same sizes.
    pub fn open(path: &Path, sizes: &[usize]) -> Result<Self, CollectiveError> {
        let layouts = group_layouts(sizes);
        let words = layouts.last().map_or(HEADER_WORDS, |layout| layout.words().end);
        let map = || -> io::Result<(File, HostSharedMemory)> {
            let file = File::options().read(true).write(true).open(path)?;
            let memory = HostSharedMemory::map(&file, words)?;
            Ok((file, memory))
        };
        let (file, memory) = map().map_err(|error| memory_error(path, &error))?;
        let found: Vec<u32> = memory.words()[..3].iter().map(|word| word.load(Acquire)).collect();
        if found != [MAGIC, LAYOUT_VERSION, words as u32] {
            let text = format!("not the shared memory of groups of {sizes:?} ranks");
            return Err(memory_error(path, &io::Error::other(text)));
        }
        Ok(Self { file, path: path.to_owned(), memory: Arc::new(memory), layouts })
    }

    /// Path with which other processes of this host open the shared memory. The path is valid until this
    /// value is dropped.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Joins a group as rank `rank`. A rank can be joined only once; restarted ranks need new shared memory.
    ///
    /// # Panics
    /// Panics if `group` or `rank` is out of range.
    pub fn join(&self, group: usize, rank: usize) -> Result<SharedMemoryGroup, CollectiveError> {
        let layout = self.layouts[group];
        assert!(rank < layout.size, "rank {rank} of {}", layout.size);
        SharedMemoryGroup::join(Arc::clone(&self.memory), layout, rank, None)
    }

    /// Returns the memory, and the layout of a group in it.
    pub(crate) fn memory_of(&self, group: usize) -> (&Arc<HostSharedMemory>, GroupMemoryLayout) {
        (&self.memory, self.layouts[group])
    }

    /// Aborts all groups: current and later waits of all ranks return an error.
    pub fn abort(&self) {
        let words = self.memory.words();
        for layout in &self.layouts {
            let _ =
                words[layout.abort_flag()].compare_exchange(0, ABORTED_BY_CREATOR, SeqCst, Relaxed);
            for rank in 0..layout.size {
                PeerWaiter::wake_waiters(&words[layout.rank_flag(rank, RankFlag::RoundsPosted)]);
            }
        }
    }

    /// Returns the most recent collective calls of a rank, oldest first; the newest call may be in flight.
    /// May be called at any time, in any process that has mapped the memory.
    #[must_use]
    pub fn call_history(&self, group: usize, rank: usize) -> Vec<CollectiveCall> {
        let (words, layout) = (self.memory.words(), &self.layouts[group]);
        let last = words[layout.rank_flag(rank, RankFlag::CallsBegun)].load(Acquire);
        let oldest = last.saturating_sub(CALL_HISTORY_LEN as u32 - 1).max(1);
        (oldest..=last)
            .map(|sequence| CollectiveCall::read(&words[layout.call_record(rank, sequence)]))
            .collect()
    }

    /// Size of the shared memory in bytes. The operating system allocates physical memory only for pages that
    /// have been written.
    pub fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }
}

fn memory_error(path: &Path, error: &io::Error) -> CollectiveError {
    CollectiveError::SharedMemory { path: path.to_owned(), error: error.to_string() }
}
