//! Layout of the shared memory of all groups of ranks, in 32-bit words.
//!
//! ```text
//! header | group 0: abort flag | rank 0: flags, 2 slot headers, call history, 2 slots | rank 1: ..
//!        | group 1: ..
//! ```
//!
//! In each round, a rank writes a chunk of data to one of its two slots, alternating between the slots. Before
//! a rank writes to the same slot again, all ranks have reached the round in between, so that no rank still
//! reads the slot.

use crate::collective_call::CALL_WORDS;
use std::ops::Range;

/// Size of a slot in bytes; larger matrices are split into chunks. A slot fits into the L2 cache of a CPU
/// core.
pub const SLOT_BYTES: usize = 256 << 10;
/// Number of calls in the call history of a rank: the most recent calls of the rank.
pub const CALL_HISTORY_LEN: usize = 1024;

/// Number of 32-bit words of a slot. A rank writes one chunk of a matrix to a slot.
pub(crate) const SLOT_WORDS: usize = SLOT_BYTES / 4;
/// Number of 32-bit words of the header of the shared memory.
pub(crate) const HEADER_WORDS: usize = CACHE_LINE_WORDS;

/// Number of 32-bit words of a cache line. Words that one rank writes and another rank polls are in separate
/// cache lines.
const CACHE_LINE_WORDS: usize = 16;
const FLAG_CACHE_LINES: usize = 4;
const RANK_WORDS: usize =
    (FLAG_CACHE_LINES + 2) * CACHE_LINE_WORDS + CALL_HISTORY_LEN * CALL_WORDS + 2 * SLOT_WORDS;

/// Kind of flag. A flag is a 32-bit word in shared memory that one rank writes and other ranks read.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RankFlag {
    /// Number of rounds (exchanges of one chunk between all ranks) that the rank has reached.
    RoundsPosted,
    /// Number of threads of other ranks that sleep until the rank reaches its next round.
    SleepingThreads,
    /// Number of collective calls that the rank has begun.
    CallsBegun,
    /// Process id of the rank; 0 before the rank has joined.
    ProcessId,
    /// Flag that is not 0 after the rank has left the group.
    HasLeft,
}

/// Layout of one group in the shared memory of all groups: index of the group's first word, and number of
/// ranks of the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GroupMemoryLayout {
    first: usize,
    /// Number of ranks of the group.
    pub(crate) size: usize,
}

/// Locations of several consecutive groups; `sizes` contains the number of ranks of each group.
pub(crate) fn group_layouts(sizes: &[usize]) -> Vec<GroupMemoryLayout> {
    let mut first = HEADER_WORDS;
    let layout = |&size: &usize| {
        let layout = GroupMemoryLayout { first, size };
        first = layout.words().end;
        layout
    };
    sizes.iter().map(layout).collect()
}

impl GroupMemoryLayout {
    /// Range of all words of this group in the shared memory.
    pub(crate) fn words(&self) -> Range<usize> {
        self.first..self.first + CACHE_LINE_WORDS + self.size * RANK_WORDS
    }

    /// Index of the word with the abort flag. The group has failed if the flag is not 0.
    pub(crate) fn abort_flag(&self) -> usize {
        self.first
    }

    /// Index of the word in shared memory with the flag `flag` of rank `rank`.
    pub(crate) fn rank_flag(&self, rank: usize, flag: RankFlag) -> usize {
        let at = match flag {
            RankFlag::RoundsPosted => 0,
            RankFlag::SleepingThreads => CACHE_LINE_WORDS,
            RankFlag::CallsBegun => 2 * CACHE_LINE_WORDS,
            RankFlag::ProcessId => 3 * CACHE_LINE_WORDS,
            RankFlag::HasLeft => 3 * CACHE_LINE_WORDS + 1,
        };
        self.rank_offset(rank) + at
    }

    /// Range of the words with the header of a slot of rank `rank`. The header contains the record of the
    /// call to which the data belongs, followed by the chunk index.
    pub(crate) fn slot_header(&self, rank: usize, slot: usize) -> Range<usize> {
        let at = self.rank_offset(rank) + (FLAG_CACHE_LINES + slot) * CACHE_LINE_WORDS;
        at..at + CALL_WORDS + 1
    }

    /// Range of the words with the record of the call `sequence` in the call history of rank `rank`.
    pub(crate) fn call_record(&self, rank: usize, sequence: u32) -> Range<usize> {
        let at = self.rank_offset(rank)
            + (FLAG_CACHE_LINES + 2) * CACHE_LINE_WORDS
            + sequence as usize % CALL_HISTORY_LEN * CALL_WORDS;
        at..at + CALL_WORDS
    }

    /// Range of the words with the data of slot `slot` of rank `rank`.
    pub(crate) fn slot(&self, rank: usize, slot: usize) -> Range<usize> {
        let end = self.rank_offset(rank) + RANK_WORDS - (1 - slot) * SLOT_WORDS;
        end - SLOT_WORDS..end
    }

    fn rank_offset(&self, rank: usize) -> usize {
        self.first + CACHE_LINE_WORDS + rank * RANK_WORDS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_regions_do_not_overlap() {
        let layouts = group_layouts(&[2, 1, 3]);
        let head = 0..HEADER_WORDS;
        let mut used: Vec<Range<usize>> = std::iter::once(head).collect();
        for layout in &layouts {
            used.push(layout.abort_flag()..layout.abort_flag() + 1);
            for rank in 0..layout.size {
                let flags = [
                    RankFlag::RoundsPosted,
                    RankFlag::SleepingThreads,
                    RankFlag::CallsBegun,
                    RankFlag::ProcessId,
                    RankFlag::HasLeft,
                ];
                used.extend(
                    flags.map(|f| layout.rank_flag(rank, f)..layout.rank_flag(rank, f) + 1),
                );
                used.extend([0, 1].map(|slot| layout.slot_header(rank, slot)));
                used.extend(
                    (0..CALL_HISTORY_LEN as u32).map(|sequence| layout.call_record(rank, sequence)),
                );
                used.extend([0, 1].map(|slot| layout.slot(rank, slot)));
            }
        }
        used.sort_by_key(|range| range.start);
        assert!(used.windows(2).all(|pair| pair[0].end <= pair[1].start));
        assert!(used.last().unwrap().end <= layouts[2].words().end);
        assert_eq!(layouts[0].words().end, layouts[1].words().start);
    }
}
