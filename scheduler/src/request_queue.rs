//! Queue of requests in service order. Insertion keeps the order, so a step never sorts.

use crate::slab::SlabSlot;
use std::collections::VecDeque;

/// Sort key of a request queue: smaller keys are served first. `arrival` is a counter of the scheduler, not a
/// clock, so keys are unique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueKey {
    pub(crate) priority: i32,
    pub(crate) arrival: u64,
}

/// A queue of requests, sorted by key.
#[derive(Debug, Default)]
pub(crate) struct RequestQueue {
    keys: VecDeque<QueueKey>,
    /// Slab slots (indices of stored requests) in the order of `keys`. They are stored separately because a
    /// step reads only the slots.
    slots: VecDeque<SlabSlot>,
}

impl RequestQueue {
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Inserts a request by its key: O(1) at the end, where new arrivals of equal priority are inserted.
    pub(crate) fn insert(&mut self, key: QueueKey, slot: SlabSlot) {
        let at_end = self.keys.back().is_none_or(|&last| last < key);
        let index = if at_end { self.len() } else { self.keys.partition_point(|&k| k < key) };
        self.keys.insert(index, key);
        self.slots.insert(index, slot);
    }

    pub(crate) fn remove(&mut self, key: QueueKey) {
        let index = self.keys.binary_search(&key).expect("a removed request is in the queue");
        self.keys.remove(index);
        self.slots.remove(index);
    }

    /// Keeps the entries for which `keep` returns true, in one pass.
    pub(crate) fn retain(&mut self, keep: impl Fn(SlabSlot) -> bool) {
        let mut slots = self.slots.iter();
        self.keys.retain(|_| slots.next().is_some_and(|&slot| keep(slot)));
        self.slots.retain(|&slot| keep(slot));
    }

    #[inline]
    pub(crate) fn get(&self, index: usize) -> SlabSlot {
        self.slots[index]
    }

    /// Iterates over keys and slots in service order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (QueueKey, SlabSlot)> + '_ {
        self.keys.iter().copied().zip(self.slots.iter().copied())
    }

    pub(crate) fn slots(&self) -> impl DoubleEndedIterator<Item = SlabSlot> + '_ {
        self.slots.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_queue_is_in_service_order() {
        let mut queue = RequestQueue::default();
        assert!(queue.is_empty());
        let key = |priority, arrival| QueueKey { priority, arrival };
        for (slot, key) in (0..).zip([key(0, 1), key(0, 2), key(-1, 3), key(0, 4), key(-1, 5)]) {
            queue.insert(key, SlabSlot(slot));
        }
        queue.remove(key(0, 2));
        let found: Vec<_> = queue.iter().map(|(key, slot)| (key.arrival, slot.0)).collect();
        assert_eq!(found, [(3, 2), (5, 4), (1, 0), (4, 3)]);
        queue.retain(|slot| slot.0 != 4);
        assert!(
            queue.iter().map(|(_, slot)| slot).eq(queue.slots()),
            "keys and slots stay in step"
        );
        assert_eq!((queue.len(), queue.is_empty(), queue.get(1)), (3, false, SlabSlot(0)));
    }
}
