//! Where everything lies in the memory of the groups of a world, in words of four bytes.
//!
//! ```text
//! head | group 0: abort | rank 0: flags, call of each slot, ring of calls, 2 slots | rank 1: .. | group 1: ..
//! ```
//!
//! A rank brings something to a round by filling one of its two slots, and the rounds take turns: who
//! writes to a slot again has seen everybody come to the round between, and so past reading it.

use crate::collective_call::CALL_WORDS;
use std::ops::Range;

/// Bytes of a slot: larger matrices are brought piece by piece. Small enough for a second-level cache.
pub const SLOT_BYTES: usize = 256 << 10;
/// Calls of each rank that are remembered.
pub const CALL_HISTORY_LEN: usize = 1024;

/// Words of a slot.
pub(crate) const SLOT_WORDS: usize = SLOT_BYTES / 4;
/// Words of the head of a file.
pub(crate) const HEADER_WORDS: usize = CACHE_LINE_WORDS;

/// Words of a cache line: what one rank writes and another waits for shares none with anything else.
const CACHE_LINE_WORDS: usize = 16;
const FLAG_CACHE_LINES: usize = 4;
const RANK_WORDS: usize =
    (FLAG_CACHE_LINES + 2) * CACHE_LINE_WORDS + CALL_HISTORY_LEN * CALL_WORDS + 2 * SLOT_WORDS;

/// What a rank says of itself.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RankFlag {
    /// Rounds that it has come to.
    RoundsPosted,
    /// Threads that sleep until it comes to another one.
    SleepingThreads,
    /// Calls that it has begun.
    CallsBegun,
    /// Its process; 0 = it has not joined.
    ProcessId,
    /// Not 0: it is gone.
    HasLeft,
}

/// The place of one group in the memory of a world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GroupLayout {
    first: usize,
    /// Ranks.
    pub(crate) size: usize,
}

/// Places of groups of these sizes, one behind the other.
pub(crate) fn group_layouts(sizes: &[usize]) -> Vec<GroupLayout> {
    let mut first = HEADER_WORDS;
    let place = |&size: &usize| {
        let place = GroupLayout { first, size };
        first = place.words().end;
        place
    };
    sizes.iter().map(place).collect()
}

impl GroupLayout {
    /// All words of the group.
    pub(crate) fn words(&self) -> Range<usize> {
        self.first..self.first + CACHE_LINE_WORDS + self.size * RANK_WORDS
    }

    /// Not 0: the group is of no further use.
    pub(crate) fn abort_flag(&self) -> usize {
        self.first
    }

    /// A flag of a rank.
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

    /// The call that a rank's slot belongs to, and the number of the piece behind it.
    pub(crate) fn slot_header(&self, rank: usize, slot: usize) -> Range<usize> {
        let at = self.rank_offset(rank) + (FLAG_CACHE_LINES + slot) * CACHE_LINE_WORDS;
        at..at + CALL_WORDS + 1
    }

    /// Where a rank remembers its call number `sequence`.
    pub(crate) fn call_record(&self, rank: usize, sequence: u32) -> Range<usize> {
        let at = self.rank_offset(rank)
            + (FLAG_CACHE_LINES + 2) * CACHE_LINE_WORDS
            + sequence as usize % CALL_HISTORY_LEN * CALL_WORDS;
        at..at + CALL_WORDS
    }

    /// A slot of a rank.
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
        let places = group_layouts(&[2, 1, 3]);
        let head = 0..HEADER_WORDS;
        let mut used: Vec<Range<usize>> = std::iter::once(head).collect();
        for place in &places {
            used.push(place.abort_flag()..place.abort_flag() + 1);
            for rank in 0..place.size {
                let flags = [
                    RankFlag::RoundsPosted,
                    RankFlag::SleepingThreads,
                    RankFlag::CallsBegun,
                    RankFlag::ProcessId,
                    RankFlag::HasLeft,
                ];
                used.extend(flags.map(|f| place.rank_flag(rank, f)..place.rank_flag(rank, f) + 1));
                used.extend([0, 1].map(|slot| place.slot_header(rank, slot)));
                used.extend(
                    (0..CALL_HISTORY_LEN as u32).map(|sequence| place.call_record(rank, sequence)),
                );
                used.extend([0, 1].map(|slot| place.slot(rank, slot)));
            }
        }
        used.sort_by_key(|range| range.start);
        assert!(used.windows(2).all(|pair| pair[0].end <= pair[1].start));
        assert!(used.last().unwrap().end <= places[2].words().end);
        assert_eq!(places[0].words().end, places[1].words().start);
    }
}
