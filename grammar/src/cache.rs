//! LRU cache of compiled grammars, keyed by the text of the constraint.

use super::compile::CompiledGrammar;
use std::collections::HashMap;

/// LRU cache of compiled grammars with a byte limit.
#[derive(Debug)]
pub(super) struct GrammarCache {
    entries: HashMap<String, GrammarCacheEntry>,
    bytes_max: usize,
    bytes: usize,
    /// Logical clock: number of lookups and insertions so far. The entries' last-use times are values of this
    /// clock.
    now: u64,
}

/// Compiled grammar in the cache, with its size and the time of its last use.
#[derive(Debug)]
struct GrammarCacheEntry {
    compiled: CompiledGrammar,
    used_at: u64,
    bytes: usize,
}

impl GrammarCache {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { entries: HashMap::new(), bytes_max, bytes: 0, now: 0 }
    }

    pub(super) fn get(&mut self, key: &str) -> Option<CompiledGrammar> {
        self.now += 1;
        let entry = self.entries.get_mut(key)?;
        entry.used_at = self.now;
        Some(entry.compiled.clone())
    }

    /// Inserts a grammar and evicts the least recently used ones. A grammar larger than the whole cache is
    /// not inserted.
    pub(super) fn put(&mut self, key: String, compiled: CompiledGrammar) {
        self.now += 1;
        let bytes = compiled.bytes + key.len();
        if bytes > self.bytes_max || self.entries.contains_key(&key) {
            return;
        }
        while self.bytes + bytes > self.bytes_max {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used_at);
            let Some(oldest) = oldest.map(|(key, _)| key.clone()) else { break };
            self.bytes -= self.entries.remove(&oldest).map_or(0, |entry| entry.bytes);
        }
        self.bytes += bytes;
        self.entries.insert(key, GrammarCacheEntry { compiled, used_at: self.now, bytes });
    }

    #[cfg(test)]
    pub(super) fn usage(&self) -> (usize, usize) {
        (self.entries.len(), self.bytes)
    }
}
