//! Requests in order of service. Order is kept on insertion, so a step never sorts.

use crate::slab::Slot;
use std::collections::VecDeque;

/// Service order, smaller first. `arrival` is a counter of the engine, not a clock, so keys differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) priority: i32,
    pub(crate) arrival: u64,
}

/// A line of requests by key.
#[derive(Debug, Default)]
pub(crate) struct Line {
    entries: VecDeque<(Key, Slot)>,
}

impl Line {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Inserts by key: O(1) at the end, where new arrivals of equal priority go.
    pub(crate) fn insert(&mut self, key: Key, slot: Slot) {
        if self.entries.back().is_none_or(|last| last.0 < key) {
            return self.entries.push_back((key, slot));
        }
        let place = self.entries.partition_point(|entry| entry.0 < key);
        self.entries.insert(place, (key, slot));
    }

    pub(crate) fn remove(&mut self, key: Key) {
        let place = self.entries.binary_search_by_key(&key, |entry| entry.0);
        self.entries.remove(place.expect("a request is in the line it left"));
    }

    /// Keeps the entries for which `keep` holds; one pass however many leave.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(Slot) -> bool) {
        self.entries.retain(|entry| keep(entry.1));
    }

    #[inline]
    pub(crate) fn get(&self, place: usize) -> Slot {
        self.entries[place].1
    }

    /// In order of service.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (Key, Slot)> + '_ {
        self.entries.iter().copied()
    }

    pub(crate) fn slots(&self) -> impl DoubleEndedIterator<Item = Slot> + '_ {
        self.entries.iter().map(|entry| entry.1)
    }
}
