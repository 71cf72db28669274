//! Tiling of non-absorbed MLA prefill (`mla_prefill.rs`): keys and values are up-projected from the compressed
//! KV for as many heads and keys at a time as a memory limit allows.

/// Number of keys that attention processes per step; the number of keys of a window is a multiple of it. Must
/// match `STEP_KEYS` in mla_prefill/long_rows.h.
pub(super) const STEP_KEYS: usize = 128;

/// Sizes from which a [`MlaPrefillTiling`] is computed: the memory limit, and the numbers and sizes of keys,
/// heads and token tiles.
#[derive(Debug, Clone, Copy)]
pub(super) struct MlaTilingInputs {
    /// Limit, in bytes, of the scratch memory for up-projected keys and values.
    pub(super) bytes: usize,
    /// Number of keys of all MLA prefill rows, each row padded to a multiple of `STEP_KEYS` keys.
    pub(super) keys: usize,
    pub(super) heads: usize,
    /// Bytes per key of the compressed KV row of the pool, and bytes per key of the expanded (up-projected)
    /// key and value of one head.
    pub(super) row_bytes: usize,
    pub(super) head_bytes: usize,
    /// `tiles`: number of token tiles. `carry_over_bytes`: bytes per token tile and head of the softmax state
    /// that is stored after one window of keys and loaded for the next.
    pub(super) tiles: usize,
    pub(super) carry_over_bytes: usize,
    /// Minimum number of (token tile, head) pairs that keep the device busy.
    pub(super) min_tiles: usize,
}

/// Numbers of heads and keys that are up-projected at a time (a window).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MlaPrefillTiling {
    pub(super) heads: usize,
    pub(super) keys: usize,
}

impl MlaTilingInputs {
    /// Chooses the window size. A window with a subset of the heads and all keys is preferred, since it needs
    /// no carry-over state. If such a window has too few (token tile, head) pairs to keep the device busy,
    /// windows have a subset of the keys instead.
    pub(super) fn plan(&self) -> MlaPrefillTiling {
        let Self { bytes, keys, row_bytes, head_bytes, tiles, carry_over_bytes, .. } = *self;
        let fitting_heads = ((bytes / keys).saturating_sub(row_bytes) / head_bytes).min(self.heads);
        if fitting_heads == self.heads
            || (fitting_heads > 0 && tiles * self.balanced_heads(fitting_heads) >= self.min_tiles)
        {
            return MlaPrefillTiling { heads: self.balanced_heads(fitting_heads), keys };
        }
        let heads =
            self.balanced_heads((bytes / 2 / (tiles * carry_over_bytes)).clamp(1, self.heads));
        let capacity = bytes.saturating_sub(tiles * heads * carry_over_bytes);
        let max_keys = capacity / (row_bytes + heads * head_bytes) / STEP_KEYS * STEP_KEYS;
        let windows = keys.div_ceil(max_keys.clamp(STEP_KEYS, keys));
        MlaPrefillTiling { heads, keys: keys.div_ceil(windows).next_multiple_of(STEP_KEYS) }
    }

    /// Returns the number of heads per window, at most `max_heads`, that divides all heads into windows of
    /// nearly equal size.
    fn balanced_heads(&self, max_heads: usize) -> usize {
        self.heads.div_ceil(self.heads.div_ceil(max_heads))
    }

    /// Returns the size of the scratch memory of a plan in bytes. If the plan has several windows it is at
    /// least the memory limit, so that later steps do not allocate more.
    pub(super) fn scratch_bytes(&self, plan: MlaPrefillTiling) -> usize {
        let expanded = plan.keys * (self.row_bytes + plan.heads * self.head_bytes);
        let carry_over = self.tiles * plan.heads * self.carry_over_bytes;
        if plan.keys < self.keys {
            return self.bytes.max(expanded + carry_over);
        }
        if plan.heads < self.heads { self.bytes.max(expanded) } else { expanded }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of tokens per token tile.
    const TILE: usize = 128;

    /// Returns the sizes of DeepSeek-V3 on an H200, with `heads` of its heads.
    fn deepseek_v3_sizes(heads: usize, tokens: usize, keys: usize) -> MlaTilingInputs {
        let (tiles, bytes) = (tokens / TILE + 1, 256 << 20);
        let carry_over_bytes = (TILE * 128 + 1024) * 4;
        let (row_bytes, head_bytes) = (1152, 512);
        MlaTilingInputs {
            bytes,
            keys,
            heads,
            row_bytes,
            head_bytes,
            tiles,
            carry_over_bytes,
            min_tiles: 264,
        }
    }

    #[test]
    fn kv_that_fits_is_expanded_at_once() {
        let sizes = deepseek_v3_sizes(16, 2048, 8192);
        assert_eq!(sizes.plan(), MlaPrefillTiling { heads: 16, keys: 8192 });
        assert_eq!(sizes.scratch_bytes(sizes.plan()), 8192 * (1152 + 16 * 512));
    }

    #[test]
    fn kv_expansion_splits_heads_before_keys() {
        assert_eq!(
            deepseek_v3_sizes(128, 2048, 8192).plan(),
            MlaPrefillTiling { heads: 43, keys: 8192 }
        );
        // Two token tiles with 43 heads each are too few (token tile, head) pairs for 132 SMs, so the plan
        // splits the keys instead of the heads.
        let few_tiles = deepseek_v3_sizes(128, 256, 8192);
        assert_eq!(few_tiles.plan().heads, 128);
        assert!(few_tiles.plan().keys < 8192);
    }

    #[test]
    fn kv_expansion_stays_within_memory() {
        for heads in [1, 8, 16, 128] {
            for tokens in [256, 1000, 8192, 65536] {
                for keys in [256, 4096, 163_840, 5_000_192].map(|n: usize| n.next_multiple_of(128))
                {
                    let sizes = deepseek_v3_sizes(heads, tokens, keys);
                    let plan = sizes.plan();
                    assert!(sizes.scratch_bytes(plan) <= sizes.bytes, "{sizes:?} {plan:?}");
                    assert!(plan.heads > 0 && plan.keys.is_multiple_of(STEP_KEYS));
                }
            }
        }
        // The smallest window, one head and `STEP_KEYS` keys, is planned even if it exceeds the memory limit.
        let minimal = MlaTilingInputs { bytes: 1, ..deepseek_v3_sizes(8, 1000, 4096) };
        assert_eq!(minimal.plan(), MlaPrefillTiling { heads: 1, keys: STEP_KEYS });
    }
}
