//! Connections between the ranks of a group on several hosts.
//!
//! The ranks of one host share memory, in which every rank of the group has its slots. A rank sends each chunk that it writes
//! to one rank of every other host, which copies the chunk to the same slot of its own host's memory. All ranks then read all
//! slots in the memory of their host, whichever host the sender is on. See `shared_layout.rs` for why a slot is free when
//! its next chunk arrives.

use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::thread::{self, JoinHandle};

use device::HostSharedMemory;

use crate::CollectiveError;
use crate::collective_call::CALL_WORDS;
use crate::peer_waiter::{PeerWaiter, abort_group};
use crate::shared_layout::{GroupMemoryLayout, RankFlag, SLOT_WORDS};

/// Number of words before the data of a frame: kind, number of the round or index of the failed rank, number of data words, the
/// last word of the slot, and the slot header.
const FRAME_HEADER_WORDS: usize = 4 + CALL_WORDS + 1;
const FRAME_HEADER_BYTES: usize = FRAME_HEADER_WORDS * 4;
/// Kind of a frame with a chunk of data.
const ROUND: u32 = 1;
/// Kind of a frame that aborts the group.
const ABORT: u32 = 2;

/// Connection from a rank of another host, whose chunks this rank copies to the memory of its host.
#[derive(Debug)]
pub(crate) struct MirroredRank {
    /// Index of the group.
    pub(crate) group: usize,
    /// Index of the rank in the group.
    pub(crate) rank: usize,
    pub(crate) stream: TcpStream,
}

/// Connection to the rank of another host that receives the chunks of this rank.
#[derive(Debug)]
pub(crate) struct ReceivingRank {
    /// Index of the rank in the group.
    pub(crate) rank: usize,
    pub(crate) stream: TcpStream,
}

/// Connections of one rank of a group to the other hosts. Dropping this value closes them, which makes the group fail there.
#[derive(Debug)]
pub(crate) struct TcpMesh {
    /// One connection per other host.
    receivers: Vec<ReceivingRank>,
    mirrors: Vec<MirrorThread>,
    frame: RefCell<Vec<u8>>,
}

/// Thread that copies the chunks of a rank of another host to the memory of this host.
#[derive(Debug)]
struct MirrorThread {
    stream: TcpStream,
    /// Whether this rank leaves the group.
    leaving: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// The chunk that a rank has written to one of its slots.
pub(crate) struct PostedChunk<'a> {
    pub(crate) round: u32,
    /// Number of data words that the rank has written at the start of the slot.
    pub(crate) words: usize,
    pub(crate) header: &'a [AtomicU32],
    pub(crate) slot: &'a [AtomicU32],
}

impl TcpMesh {
    /// Starts to copy the chunks of `mirrored` to `memory`, as rank `own`. `receivers` are connections to the ranks of the other hosts that
    /// receive the chunks of this rank.
    ///
    /// Errors: no thread or file descriptor is available.
    pub(crate) fn start(
        own: usize,
        receivers: Vec<ReceivingRank>,
        mirrored: Vec<MirroredRank>,
        memory: &Arc<HostSharedMemory>,
        layout: GroupMemoryLayout,
    ) -> io::Result<Self> {
        let start = |MirroredRank { rank, stream, .. }| {
            let handle = stream.try_clone()?;
            let leaving = Arc::new(AtomicBool::new(false));
            let (memory, own_leaving) = (Arc::clone(memory), Arc::clone(&leaving));
            let mirror = RankMirror { memory, layout, rank, own, leaving: own_leaving };
            // The rank is alive as long as the process that copies its chunks.
            mirror.flag(RankFlag::ProcessId).store(std::process::id(), SeqCst);
            let thread = thread::Builder::new().name("rank-mirror".to_owned());
            let thread = thread.spawn(move || mirror.run(stream))?;
            Ok(MirrorThread { stream: handle, leaving, thread: Some(thread) })
        };
        let mirrors = mirrored.into_iter().map(start).collect::<io::Result<_>>()?;
        Ok(Self { receivers, mirrors, frame: RefCell::default() })
    }

    /// Sends a chunk to the other hosts.
    ///
    /// Errors: a connection has failed.
    pub(crate) fn send(&self, chunk: &PostedChunk<'_>) -> Result<(), CollectiveError> {
        let mut frame = self.frame.borrow_mut();
        frame.clear();
        let last = chunk.slot.last().map_or(0, |word| word.load(Relaxed));
        for word in [ROUND, chunk.round, chunk.words as u32, last] {
            frame.extend(word.to_le_bytes());
        }
        for word in chunk.header.iter().chain(&chunk.slot[..chunk.words]) {
            frame.extend(word.load(Relaxed).to_le_bytes());
        }
        self.receivers.iter().try_for_each(|ReceivingRank { rank, stream }| {
            let mut stream = stream;
            stream.write_all(&frame).map_err(|error| CollectiveError::LinkFailed {
                rank: *rank,
                error: error.to_string(),
            })
        })
    }

    /// Aborts the group on the other hosts, because rank `failed_rank` has failed.
    pub(crate) fn abort(&self, failed_rank: usize) {
        let mut frame = [0; FRAME_HEADER_BYTES];
        frame[..4].copy_from_slice(&ABORT.to_le_bytes());
        frame[4..8].copy_from_slice(&(failed_rank as u32).to_le_bytes());
        for ReceivingRank { stream, .. } in &self.receivers {
            let mut stream = stream;
            // A host whose connection has failed detects the failure itself.
            let _ = stream.write_all(&frame);
        }
    }
}

impl Drop for TcpMesh {
    #[expect(clippy::disallowed_methods, reason = "the threads end when their streams are closed")]
    fn drop(&mut self) {
        for mirror in &self.mirrors {
            mirror.leaving.store(true, SeqCst);
        }
        let receivers = self.receivers.iter().map(|receiver| &receiver.stream);
        let streams = receivers.chain(self.mirrors.iter().map(|mirror| &mirror.stream));
        for stream in streams {
            let _ = stream.shutdown(Shutdown::Both); // The peer may have closed it already.
        }
        for thread in self.mirrors.iter_mut().filter_map(|mirror| mirror.thread.take()) {
            let _ = thread.join(); // The panic hook has already reported a panic of the thread.
        }
    }
}

/// A rank of another host in the memory of this host.
struct RankMirror {
    memory: Arc<HostSharedMemory>,
    layout: GroupMemoryLayout,
    rank: usize,
    /// Rank that receives the chunks.
    own: usize,
    leaving: Arc<AtomicBool>,
}

impl RankMirror {
    fn flag(&self, flag: RankFlag) -> &AtomicU32 {
        &self.memory.words()[self.layout.rank_flag(self.rank, flag)]
    }

    /// Copies chunks until the connection ends.
    fn run(self, mut stream: TcpStream) {
        let mut bytes = Vec::new();
        let mut header = [0; FRAME_HEADER_BYTES];
        while stream.read_exact(&mut header).is_ok() {
            let words: [u32; FRAME_HEADER_WORDS] = std::array::from_fn(|i| {
                u32::from_le_bytes([0, 1, 2, 3].map(|byte| header[i * 4 + byte]))
            });
            let [kind, number, data_words, last, slot_header @ ..] = words;
            let data_words = data_words as usize;
            if kind == ABORT {
                let failed = CollectiveError::RankFailed { rank: number as usize };
                abort_group(self.memory.words(), &self.layout, self.rank, &failed);
                continue;
            }
            bytes.resize(data_words.min(SLOT_WORDS) * 4, 0);
            if kind != ROUND || data_words > SLOT_WORDS || stream.read_exact(&mut bytes).is_err() {
                break;
            }
            self.post(number, &slot_header, &bytes, last);
        }
        if self.leaving.load(SeqCst) {
            // The rank of the other host is alive, but without this rank its chunks do not arrive.
            let left = CollectiveError::RankFailed { rank: self.own };
            return abort_group(self.memory.words(), &self.layout, self.own, &left);
        }
        self.flag(RankFlag::HasLeft).store(1, SeqCst);
        PeerWaiter::wake_waiters(self.flag(RankFlag::RoundsPosted));
    }

    /// Writes a chunk to its slot, and wakes the ranks of this host that wait for it.
    fn post(&self, round: u32, header: &[u32], data: &[u8], last: u32) {
        let (words, slot) = (self.memory.words(), round as usize % 2);
        let slot_header = &words[self.layout.slot_header(self.rank, slot)];
        for (word, &value) in slot_header.iter().zip(header) {
            word.store(value, Relaxed);
        }
        let slot = &words[self.layout.slot(self.rank, slot)];
        slot[SLOT_WORDS - 1].store(last, Relaxed);
        for (word, bytes) in slot.iter().zip(data.as_chunks().0) {
            word.store(u32::from_le_bytes(*bytes), Relaxed);
        }
        PeerWaiter::post_round(words, &self.layout, self.rank, round);
    }
}
