//! Where everything lies in the memory of the groups of a world, in words of four bytes.
//!
//! ```text
//! head | group 0: abort | rank 0: flags, call of each slot, ring of calls, 2 slots | rank 1: .. | group 1: ..
//! ```
//!
//! A rank brings something to a round by filling one of its two slots, and the rounds take turns: who
//! writes to a slot again has seen everybody come to the round between, and so past reading it.

use crate::call::CALL_WORDS;
use std::ops::Range;

/// Bytes of a slot: larger matrices are brought piece by piece. Small enough for a second-level cache.
pub const SLOT_BYTES: usize = 256 << 10;
/// Calls of each rank that are remembered.
pub const CALLS: usize = 1024;

/// Words of a slot.
pub(crate) const SLOT_WORDS: usize = SLOT_BYTES / 4;
/// Words of the head of a file.
pub(crate) const HEAD_WORDS: usize = LINE;

/// Words of a cache line: what one rank writes and another waits for shares none with anything else.
const LINE: usize = 16;
const FLAG_LINES: usize = 4;
const RANK_WORDS: usize = (FLAG_LINES + 2) * LINE + CALLS * CALL_WORDS + 2 * SLOT_WORDS;

/// What a rank says of itself.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Flag {
    /// Rounds that it has come to.
    Posted,
    /// Threads that sleep until it comes to another one.
    Asleep,
    /// Calls that it has begun.
    Calls,
    /// Its process; 0 = it has not joined.
    Process,
    /// Not 0: it is gone.
    Left,
}

/// The place of one group in the memory of a world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    first: usize,
    /// Ranks.
    pub(crate) size: usize,
}

/// Places of groups of these sizes, one behind the other.
pub(crate) fn places(sizes: &[usize]) -> Vec<Place> {
    let mut first = HEAD_WORDS;
    let place = |&size: &usize| {
        let place = Place { first, size };
        first = place.words().end;
        place
    };
    sizes.iter().map(place).collect()
}

impl Place {
    /// All words of the group.
    pub(crate) fn words(&self) -> Range<usize> {
        self.first..self.first + LINE + self.size * RANK_WORDS
    }

    /// Not 0: the group is of no further use.
    pub(crate) fn abort(&self) -> usize {
        self.first
    }

    /// A flag of a rank.
    pub(crate) fn flag(&self, rank: usize, flag: Flag) -> usize {
        let at = match flag {
            Flag::Posted => 0,
            Flag::Asleep => LINE,
            Flag::Calls => 2 * LINE,
            Flag::Process => 3 * LINE,
            Flag::Left => 3 * LINE + 1,
        };
        self.rank(rank) + at
    }

    /// The call that a rank's slot belongs to, and the number of the piece behind it.
    pub(crate) fn of_slot(&self, rank: usize, slot: usize) -> Range<usize> {
        let at = self.rank(rank) + (FLAG_LINES + slot) * LINE;
        at..at + CALL_WORDS + 1
    }

    /// Where a rank remembers its call number `sequence`.
    pub(crate) fn call(&self, rank: usize, sequence: u32) -> Range<usize> {
        let at = self.rank(rank) + (FLAG_LINES + 2) * LINE + sequence as usize % CALLS * CALL_WORDS;
        at..at + CALL_WORDS
    }

    /// A slot of a rank.
    pub(crate) fn slot(&self, rank: usize, slot: usize) -> Range<usize> {
        let end = self.rank(rank) + RANK_WORDS - (1 - slot) * SLOT_WORDS;
        end - SLOT_WORDS..end
    }

    fn rank(&self, rank: usize) -> usize {
        self.first + LINE + rank * RANK_WORDS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps_and_nothing_is_outside() {
        let places = places(&[2, 1, 3]);
        let head = 0..HEAD_WORDS;
        let mut used: Vec<Range<usize>> = std::iter::once(head).collect();
        for place in &places {
            used.push(place.abort()..place.abort() + 1);
            for rank in 0..place.size {
                let flags = [Flag::Posted, Flag::Asleep, Flag::Calls, Flag::Process, Flag::Left];
                used.extend(flags.map(|f| place.flag(rank, f)..place.flag(rank, f) + 1));
                used.extend([0, 1].map(|slot| place.of_slot(rank, slot)));
                used.extend((0..CALLS as u32).map(|sequence| place.call(rank, sequence)));
                used.extend([0, 1].map(|slot| place.slot(rank, slot)));
            }
        }
        used.sort_by_key(|range| range.start);
        assert!(used.windows(2).all(|pair| pair[0].end <= pair[1].start));
        assert!(used.last().unwrap().end <= places[2].words().end);
        assert_eq!(places[0].words().end, places[1].words().start);
    }
}
