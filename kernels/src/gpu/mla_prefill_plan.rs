//! How much of keys and values made of latents is there at a time (`mla_prefill.rs`).

/// Keys of a step, and what windows of keys are whole numbers of. The twin of `STEP_KEYS` in mla_prefill/long_rows.h.
pub(super) const STEP_KEYS: usize = 128;

/// Sizes that what is made at a time depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct KvExpansionSizes {
    /// Bytes that there are.
    pub(super) bytes: usize,
    /// Keys of all rows, in whole steps.
    pub(super) keys: usize,
    pub(super) heads: usize,
    /// Bytes of a row of the pool, and of a key and a value of one head.
    pub(super) row_bytes: usize,
    pub(super) head_bytes: usize,
    /// Tiles of tokens of which something may be carried from window to window, and how many bytes of a head.
    pub(super) tiles: usize,
    pub(super) carry_over_bytes: usize,
    /// Tiles of tokens and heads that keep the device busy.
    pub(super) min_tiles: usize,
}

/// Heads, and keys, whose keys and values are made at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KvExpansionPlan {
    pub(super) heads: usize,
    pub(super) keys: usize,
}

impl KvExpansionSizes {
    /// Few heads with all keys, of which nothing is carried, unless so few leave the device idle; else windows of keys.
    pub(super) fn plan(&self) -> KvExpansionPlan {
        let Self {
            bytes, keys, row_bytes, head_bytes, tiles, carry_over_bytes: carried_bytes, ..
        } = *self;
        let whole = ((bytes / keys).saturating_sub(row_bytes) / head_bytes).min(self.heads);
        if whole == self.heads || (whole > 0 && tiles * self.evenly(whole) >= self.min_tiles) {
            return KvExpansionPlan { heads: self.evenly(whole), keys };
        }
        let heads = self.evenly((bytes / 2 / (tiles * carried_bytes)).clamp(1, self.heads));
        let room = bytes.saturating_sub(tiles * heads * carried_bytes);
        let most = room / (row_bytes + heads * head_bytes) / STEP_KEYS * STEP_KEYS;
        let windows = keys.div_ceil(most.clamp(STEP_KEYS, keys));
        KvExpansionPlan { heads, keys: keys.div_ceil(windows).next_multiple_of(STEP_KEYS) }
    }

    /// So many heads at most, as many each time.
    fn evenly(&self, most: usize) -> usize {
        self.heads.div_ceil(self.heads.div_ceil(most))
    }

    /// Of a plan whose windows are not all there is: all bytes, so that a later step asks for no more.
    pub(super) fn scratch_bytes(&self, plan: KvExpansionPlan) -> usize {
        let made = plan.keys * (self.row_bytes + plan.heads * self.head_bytes);
        let carried = self.tiles * plan.heads * self.carry_over_bytes;
        if plan.keys < self.keys {
            return self.bytes.max(made + carried);
        }
        if plan.heads < self.heads { self.bytes.max(made) } else { made }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens of a tile.
    const TILE: usize = 128;

    /// DeepSeek-V3 on an H200, or a part of its heads.
    fn need(heads: usize, tokens: usize, keys: usize) -> KvExpansionSizes {
        let (tiles, bytes) = (tokens / TILE + 1, 256 << 20);
        let carried_bytes = (TILE * 128 + 1024) * 4;
        let (row_bytes, head_bytes) = (1152, 512);
        KvExpansionSizes {
            bytes,
            keys,
            heads,
            row_bytes,
            head_bytes,
            tiles,
            carry_over_bytes: carried_bytes,
            min_tiles: 264,
        }
    }

    #[test]
    fn kv_that_fits_is_expanded_at_once() {
        let need = need(16, 2048, 8192);
        assert_eq!(need.plan(), KvExpansionPlan { heads: 16, keys: 8192 });
        assert_eq!(need.scratch_bytes(need.plan()), 8192 * (1152 + 16 * 512));
    }

    #[test]
    fn kv_expansion_splits_heads_before_keys() {
        assert_eq!(need(128, 2048, 8192).plan(), KvExpansionPlan { heads: 43, keys: 8192 });
        // Two tiles of 43 heads are no work for 132 multiprocessors.
        let few = need(128, 256, 8192);
        assert_eq!(few.plan().heads, 128);
        assert!(few.plan().keys < 8192);
    }

    #[test]
    fn kv_expansion_stays_within_memory() {
        for heads in [1, 8, 16, 128] {
            for tokens in [256, 1000, 8192, 65536] {
                for keys in [256, 4096, 163_840, 5_000_192].map(|n: usize| n.next_multiple_of(128))
                {
                    let need = need(heads, tokens, keys);
                    let plan = need.plan();
                    assert!(need.scratch_bytes(plan) <= need.bytes, "{need:?} {plan:?}");
                    assert!(plan.heads > 0 && plan.keys.is_multiple_of(STEP_KEYS));
                }
            }
        }
        // But for a step of one head.
        let least = KvExpansionSizes { bytes: 1, ..need(8, 1000, 4096) };
        assert_eq!(least.plan(), KvExpansionPlan { heads: 1, keys: STEP_KEYS });
    }
}
