//! LRU store of objects with a byte limit. Each object is visible only to the API key that created it.

use super::auth::CallerIdentity;
use std::collections::{BTreeMap, HashMap};

/// Overhead of an object in bytes, in addition to its texts.
const ENTRY_BYTES: usize = 256;

/// Object that clients may fetch later.
pub(crate) trait StoredObject {
    /// Returns the identity of the caller that created the object.
    fn owner(&self) -> CallerIdentity;

    /// Returns the number of bytes of the object's texts.
    fn text_bytes(&self) -> usize;

    /// Whether the object must not be evicted now.
    fn is_pinned(&self) -> bool {
        false
    }
}

/// Stored object, and the time of its last use as a value of the store's use counter.
struct LruEntry<T> {
    object: T,
    used: u64,
}

/// Objects by id. The least recently used objects are evicted when the byte limit is exceeded.
pub(crate) struct ObjectLru<T> {
    bytes_max: usize,
    entries: HashMap<String, LruEntry<T>>,
    by_use: BTreeMap<u64, String>,
    bytes: usize,
    clock: u64,
}

impl<T: StoredObject> ObjectLru<T> {
    /// Creates an empty store of at most `bytes_max` bytes.
    pub(crate) fn new(bytes_max: usize) -> Self {
        let (entries, by_use) = (HashMap::new(), BTreeMap::new());
        Self { bytes_max, entries, by_use, bytes: 0, clock: 0 }
    }

    /// Returns an object of the caller and marks it as used.
    pub(crate) fn touch(&mut self, caller: CallerIdentity, id: &str) -> Option<&T> {
        let object = self.take_owned(caller, id)?;
        self.put(id, object);
        self.entries.get(id).map(|entry| &entry.object)
    }

    /// Removes and returns an object if it belongs to the caller. An object of another caller is treated as
    /// unknown.
    pub(crate) fn take_owned(&mut self, caller: CallerIdentity, id: &str) -> Option<T> {
        self.take_if(id, |object| object.owner() == caller)
    }

    /// Removes and returns an object if it satisfies `condition`.
    pub(crate) fn take_if(&mut self, id: &str, condition: impl Fn(&T) -> bool) -> Option<T> {
        self.entries.get(id).filter(|entry| condition(&entry.object))?;
        self.take(id)
    }

    /// Stores an object and evicts the least recently used ones; returns false if the object by itself
    /// exceeds the byte limit.
    pub(crate) fn put(&mut self, id: &str, object: T) -> bool {
        self.take(id);
        let bytes = object.text_bytes() + ENTRY_BYTES;
        if bytes > self.bytes_max {
            return false;
        }
        self.clock += 1;
        self.bytes += bytes;
        self.by_use.insert(self.clock, id.to_owned());
        self.entries.insert(id.to_owned(), LruEntry { object, used: self.clock });
        while self.bytes > self.bytes_max {
            let is_evictable =
                |id: &&String| self.entries.get(*id).is_some_and(|entry| !entry.object.is_pinned());
            let mut candidates = self.by_use.values().filter(|other| *other != id);
            let Some(oldest) = candidates.find(is_evictable).cloned() else { break };
            self.take(&oldest);
        }
        true
    }

    fn take(&mut self, id: &str) -> Option<T> {
        let LruEntry { object, used } = self.entries.remove(id)?;
        self.by_use.remove(&used);
        self.bytes -= object.text_bytes() + ENTRY_BYTES;
        Some(object)
    }
}
