//! Keys of full blocks: a public chained hash and a private guard.
//!
//! `hash_i = xxh64(0, P ++ T ++ E)`: P = `hash_{i-1}` as u64 LE (absent for block 0), T = the token ids, each
//! i64 LE, E = extra keys as tag-length-value followed by `2^63 | length` (absent without extra keys). The
//! encoding is injective: token ids are not negative, so the last word has its top bit set iff E is present.
//! xxh64 can be forged, hence `guard_i = SipHash-2-4(key, guard_{i-1} ++ T ++ E)` under a key that never
//! leaves the process. A prefix hit requires equal hash, guard, token ids and extra keys.

use protocol::{BlockHash, ExtraKey, Token};
use siphasher::sip::SipHasher24;
use std::hash::Hasher as _;
use std::sync::Arc;
use xxhash_rust::xxh64::Xxh64;

/// Key of a full block: identifies its content and all preceding blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockKey {
    /// Chained hash of the block's content and all preceding blocks, published in KV events.
    pub hash: BlockHash,
    /// Keyed digest of the block's content and all preceding blocks. It is never published and is compared on
    /// every prefix hit, because `hash` can be forged.
    pub guard: u64,
}

/// Digest and position of a multimodal item.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MediaItem {
    /// Digest of the item's content.
    pub digest: [u8; 16],
    /// Position of the item's first token in the sequence.
    pub start: u32,
    /// Number of tokens of the item.
    pub len: u32,
}

/// Inputs other than token ids that determine the KV content of a request's blocks.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct ExtraKeys {
    /// LoRA adapter name, hashed with every block.
    pub lora: Option<String>,
    /// Multimodal items. Each item is hashed with the blocks that it overlaps.
    pub media: Vec<MediaItem>,
    /// Cache salt, which separates tenants. It is hashed with the first block, and thus affects the chained
    /// hashes of all blocks.
    pub salt: Option<String>,
    /// Digest of the prompt embeddings that a client sent instead of token ids, hashed with every block.
    pub embedding: Option<[u8; 16]>,
}

impl ExtraKeys {
    /// Returns the extra keys of a request that has only a cache salt; `None` without a salt.
    pub fn salted(salt: Option<String>) -> Option<Arc<Self>> {
        salt.map(|salt| Arc::new(Self { salt: Some(salt), ..Self::default() }))
    }

    /// Returns the extra keys of block `index`, as they are reported in KV events.
    pub fn for_block(&self, index: u32) -> Vec<ExtraKey> {
        let lora = self.lora.iter().map(|name| ExtraKey::Lora(name.clone()));
        let salt = self.salt.iter().filter(|_| index == 0).map(|s| ExtraKey::Salt(s.clone()));
        lora.chain(salt).collect()
    }

    /// Returns whether two requests with extra keys `a` and `b` have equal extra keys in block `index`, for
    /// blocks of `bs` tokens.
    pub(crate) fn same_in_block(a: Option<&Self>, b: Option<&Self>, index: u32, bs: u32) -> bool {
        let encoded = |extra: Option<&Self>| {
            let mut bytes = Vec::new();
            extra.inspect(|extra| extra.encode(index * bs, bs, &mut bytes));
            bytes
        };
        a == b || encoded(a) == encoded(b)
    }

    /// Appends the encoded extra keys (`E` in the module comment) of the block that starts at position
    /// `start`: tags in ascending order, then the length word.
    fn encode(&self, start: u32, block_tokens: u32, out: &mut Vec<u8>) {
        let first = out.len();
        let mut put = |tag: u8, parts: [&[u8]; 2]| {
            out.push(tag);
            out.extend(((parts[0].len() + parts[1].len()) as u32).to_le_bytes());
            out.extend(parts[0]);
            out.extend(parts[1]);
        };
        if let Some(lora) = &self.lora {
            put(1, [lora.as_bytes(), &[]]);
        }
        let end = start + block_tokens;
        for item in self.media.iter().filter(|m| m.start < end && start < m.start + m.len) {
            let offset = (i64::from(item.start) - i64::from(start)) as i32;
            put(2, [&item.digest, &offset.to_le_bytes()]);
        }
        if let Some(salt) = self.salt.as_ref().filter(|_| start == 0) {
            put(3, [salt.as_bytes(), &[]]);
        }
        if let Some(digest) = &self.embedding {
            put(4, [digest, &[]]);
        }
        let bytes = (out.len() - first) as u64;
        if bytes > 0 {
            out.extend((1 << 63 | bytes).to_le_bytes());
        }
    }
}

/// Computes block keys of one cache.
#[derive(Debug, Clone, Copy)]
pub struct BlockHasher {
    block_tokens: u32,
    guard_key: [u64; 2],
    hash_mask: u64,
}

impl BlockHasher {
    pub(crate) fn new(block_tokens: u32, key: [u64; 2], bits: u8) -> Self {
        let hash_mask = u64::MAX >> (64 - u32::from(bits.clamp(1, 64)));
        Self { block_tokens, guard_key: key, hash_mask }
    }

    /// Appends to `keys` the keys of those full blocks of `tokens` that have no key in `keys` yet.
    pub fn extend_keys(
        &self,
        keys: &mut Vec<BlockKey>,
        tokens: &[Token],
        extra: Option<&ExtraKeys>,
    ) {
        let bs = self.block_tokens as usize;
        let missing = keys.len()..tokens.len() / bs;
        let mut scratch = Vec::with_capacity(missing.len().min(1) * bs * size_of::<u64>());
        for index in missing {
            let ids = &tokens[index * bs..(index + 1) * bs];
            let key = self.block_key(keys.last().copied(), index as u32, ids, extra, &mut scratch);
            keys.push(key);
        }
    }

    fn block_key(
        &self,
        parent: Option<BlockKey>,
        index: u32,
        ids: &[Token],
        extra: Option<&ExtraKeys>,
        scratch: &mut Vec<u8>,
    ) -> BlockKey {
        scratch.clear();
        scratch.extend(ids.iter().flat_map(|&id| u64::from(id).to_le_bytes()));
        if let Some(extra) = extra {
            extra.encode(index * self.block_tokens, self.block_tokens, scratch);
        }
        let mut hash = Xxh64::new(0);
        let mut guard = SipHasher24::new_with_keys(self.guard_key[0], self.guard_key[1]);
        if let Some(parent) = parent {
            hash.update(&parent.hash.0.to_le_bytes());
            guard.write(&parent.guard.to_le_bytes());
        }
        hash.update(scratch);
        guard.write(scratch);
        // The hash is never 0, because some consumers of KV events interpret 0 as "no parent".
        let hash = BlockHash((hash.digest() & self.hash_mask).max(1));
        BlockKey { hash, guard: guard.finish() }
    }
}

/// Computes block keys of prompts on the submitting thread instead of the scheduler thread.
#[derive(Debug, Clone, Copy)]
pub struct PromptHasher {
    hasher: BlockHasher,
    caching: bool,
}

impl PromptHasher {
    /// Creates a hasher. Without prefix caching (`caching` is false), the hasher returns no keys and computes
    /// nothing.
    pub fn new(hasher: BlockHasher, caching: bool) -> Self {
        Self { hasher, caching }
    }

    /// Returns the keys of the full blocks of a prompt.
    pub fn hash_prompt(&self, tokens: &[Token], extra: Option<&ExtraKeys>) -> Vec<BlockKey> {
        if !self.caching {
            return Vec::new();
        }
        let mut keys = Vec::with_capacity(tokens.len() / self.hasher.block_tokens as usize + 1);
        self.hasher.extend_keys(&mut keys, tokens, extra);
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(bs: u32, tokens: &[Token], extra: Option<&ExtraKeys>) -> Vec<u64> {
        let hasher = BlockHasher::new(bs, [1, 2], 64);
        PromptHasher::new(hasher, true)
            .hash_prompt(tokens, extra)
            .iter()
            .map(|k| k.hash.0)
            .collect()
    }

    const EIGHT: [Token; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

    fn lora_and_salt(lora: Option<&str>, salt: Option<&str>) -> ExtraKeys {
        let owned = |s: &str| s.to_owned();
        ExtraKeys { lora: lora.map(owned), salt: salt.map(owned), ..ExtraKeys::default() }
    }

    #[test]
    fn plain_chain_vectors() {
        assert_eq!(hashes(4, &EIGHT, None), [8_356_527_653_647_720_045, 610_383_040_053_763_902]);
        let ascending: Vec<Token> = (0..16).collect();
        assert_eq!(hashes(16, &ascending, None), [50_805_424_035_424_587]);
        assert_eq!(hashes(16, &[0; 16], None), [8_040_990_501_003_754_519]);
    }

    #[test]
    fn extra_key_vectors() {
        let salt = lora_and_salt(None, Some("tenant-a"));
        let expected = [2_306_828_092_844_964_485, 12_387_133_016_671_752_586];
        assert_eq!(hashes(4, &EIGHT, Some(&salt)), expected);
        let lora = lora_and_salt(Some("sql-v2"), None);
        let expected = [10_707_569_423_191_416_226, 6_103_950_829_815_179_899];
        assert_eq!(hashes(4, &EIGHT, Some(&lora)), expected);
        let both = lora_and_salt(Some("sql-v2"), Some("tenant-a"));
        assert_eq!(hashes(4, &EIGHT[..4], Some(&both)), [17_562_283_148_452_703_261]);
        let digest = std::array::from_fn(|i| i as u8);
        let item = MediaItem { digest, start: 1, len: 2 };
        let media = ExtraKeys { media: vec![item], ..ExtraKeys::default() };
        assert_eq!(hashes(4, &EIGHT[..4], Some(&media)), [836_623_385_267_956_103]);
    }

    #[test]
    fn block_hashes_depend_on_their_own_extra_keys() {
        assert_eq!(ExtraKeys::salted(None), None);
        let salt = ExtraKeys::salted(Some("tenant-a".to_owned())).unwrap();
        assert_eq!(*salt, lora_and_salt(None, Some("tenant-a")));
        assert_eq!(salt.for_block(0), [ExtraKey::Salt("tenant-a".to_owned())]);
        assert_eq!(salt.for_block(1), []);
        let [plain, salted] = [None, Some("tenant-a")].map(|salt| lora_and_salt(None, salt));
        let tuned = lora_and_salt(Some("sql-v2"), None);
        let same = |a: &ExtraKeys, b, index| ExtraKeys::same_in_block(Some(a), b, index, 4);
        let again = salted.clone();
        assert!(same(&salted, Some(&again), 0));
        assert!(!same(&salted, Some(&plain), 0) && !same(&salted, None, 0));
        assert!(same(&salted, Some(&plain), 1), "a salt is an extra key of the first block only");
        assert!(!same(&tuned, Some(&plain), 0) && !same(&tuned, Some(&plain), 1));
        let item = MediaItem { digest: [7; 16], start: 2, len: 6 };
        let media = ExtraKeys { media: vec![item], ..ExtraKeys::default() };
        let depends = [0, 1, 2].map(|index| !same(&media, None, index));
        assert_eq!(depends, [true, true, false], "tokens 2 to 7 are in blocks 0 and 1");
        let item = MediaItem { digest: [7; 16], start: 4, len: 4 };
        let media = ExtraKeys { media: vec![item], ..ExtraKeys::default() };
        let depends = [0, 1, 2].map(|index| !same(&media, None, index));
        assert_eq!(depends, [false, true, false], "tokens 4 to 7 are in block 1");
    }

    #[test]
    fn salt_encoding_matches_documentation() {
        let ids = [9, 9];
        let mut bytes = ids.to_vec();
        lora_and_salt(None, Some("tenant-a")).encode(0, 4, &mut bytes);
        let mut expected = ids.to_vec();
        expected.extend([3, 8, 0, 0, 0]);
        expected.extend(b"tenant-a");
        expected.extend([0x0d, 0, 0, 0, 0, 0, 0, 0x80]);
        assert_eq!(bytes, expected);
    }

    #[test]
    fn media_encoding_includes_offset_within_block() {
        let item = MediaItem { digest: [7; 16], start: 2, len: 6 };
        let media = ExtraKeys { media: vec![item], ..ExtraKeys::default() };
        for (start, offset) in [(0, 2_i32), (4, -2)] {
            let mut bytes = Vec::new();
            media.encode(start, 4, &mut bytes);
            let mut expected = vec![2, 20, 0, 0, 0];
            expected.extend([7; 16]);
            expected.extend(offset.to_le_bytes());
            expected.extend([25, 0, 0, 0, 0, 0, 0, 0x80]);
            assert_eq!(bytes, expected, "block at {start}");
        }
    }

    #[test]
    fn truncated_hashes_are_nonzero_with_distinct_guards() {
        let hasher = BlockHasher::new(1, [3, 4], 1);
        let mut keys = Vec::new();
        hasher.extend_keys(&mut keys, &EIGHT, None);
        assert!(keys.iter().all(|k| k.hash.0 == 1));
        let guards: std::collections::BTreeSet<u64> = keys.iter().map(|k| k.guard).collect();
        assert_eq!(guards.len(), keys.len());
    }
}
