//! Sizes of the splits of decode attention (`attention_decode`).

use super::attention_heads::LARGE_HEAD;

/// Split size of split-KV decoding: for context lengths of up to `max_context_len` tokens, the maximum number
/// of keys per split.
#[derive(Debug, Clone, Copy)]
pub(super) struct KvSplitSize {
    pub(super) max_context_len: usize,
    pub(super) keys: usize,
}

impl KvSplitSize {
    pub(super) const fn new(max_context_len: usize, keys: usize) -> Self {
        Self { max_context_len, keys }
    }

    /// Returns the maximum number of keys per split on a GPU with this divisor (`LaunchLimits::split_divisor`).
    pub(super) fn keys_with(self, divisor: usize) -> usize {
        (self.keys / divisor).max(MIN_SPLIT_KEYS)
    }
}

/// Minimum number of keys per split; must match `MIN_SPLIT_KEYS` in attention_decode.hip and mla_decode.hip.
const MIN_SPLIT_KEYS: usize = 128;

/// Split sizes of the decode kernel, in ascending order of context length; must match `split_keys` in
/// attention_decode.hip.
const SPLITS: &[KvSplitSize] = &[
    KvSplitSize::new(8192, 448),
    KvSplitSize::new(32768, 512),
    KvSplitSize::new(usize::MAX, 1024),
];
/// Split sizes for steps of at most `SMALL_BATCH_ROWS` requests. With the larger split sizes of `SPLITS`,
/// these steps would have too few splits to use all SMs.
const SMALL_BATCH_SPLITS: &[KvSplitSize] = &[
    KvSplitSize::new(8192, 256),
    KvSplitSize::new(32768, 512),
    KvSplitSize::new(usize::MAX, 1024),
];
/// Split sizes for steps of at most `SMALL_BATCH_ROWS` requests with heads of more than 256 channels. The partial results
/// of a split are larger, and the last block of a head merges them alone.
const LARGE_HEAD_SMALL_BATCH_SPLITS: &[KvSplitSize] = &[
    KvSplitSize::new(2048, 128),
    KvSplitSize::new(8192, 512),
    KvSplitSize::new(32768, 1024),
    KvSplitSize::new(usize::MAX, 4096),
];
/// Maximum number of requests of a small batch on an H200; multiplied by `LaunchLimits::split_divisor`. Time per decode step at a context of 1,150 tokens on an H200,
/// in ms, with splits of 256 and of 448 keys: Qwen3-0.6B 0.845 and 0.893 for 4 rows, 1.04 and 0.995 for 8;
/// Qwen3-8B 4.42 and 4.47 for 4.
pub(super) const SMALL_BATCH_ROWS: usize = 4;
/// Split sizes of the decode kernel with the define `FROM_QKV`, which also computes QK norm, RoPE and the KV
/// write.
pub(super) const SINGLE_ROW_SPLITS: &[KvSplitSize] = &[
    KvSplitSize::new(2048, 128),
    KvSplitSize::new(8192, 256),
    KvSplitSize::new(32768, 512),
    KvSplitSize::new(usize::MAX, 1024),
];

/// Returns the split sizes of the decode kernel for heads of `head_dim` channels.
pub(super) fn split_sizes(head_dim: usize, small_batch: bool) -> &'static [KvSplitSize] {
    match small_batch {
        true if head_dim > LARGE_HEAD => LARGE_HEAD_SMALL_BATCH_SPLITS,
        true => SMALL_BATCH_SPLITS,
        false => SPLITS,
    }
}

/// Returns the maximum number of splits over all contexts of up to `max_context_len` tokens, with lengths divided by
/// `divisor`.
pub(super) fn max_splits(max_context_len: usize, splits: &[KvSplitSize], divisor: usize) -> usize {
    let mut from = 0;
    let mut max_splits = 1;
    for split in splits {
        if max_context_len > from {
            let longest = max_context_len.min(split.max_context_len);
            max_splits = max_splits.max(longest.div_ceil(split.keys_with(divisor)));
        }
        from = split.max_context_len;
    }
    max_splits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn max_splits_covers_every_context_length() {
        let splits = |context: usize, all: &[KvSplitSize], divisor| {
            let split = all.iter().find(|split| context <= split.max_context_len).unwrap();
            context.div_ceil(split.keys_with(divisor))
        };
        for longest in
            [1, 255, 256, 257, 448, 449, 2048, 2049, 8192, 8193, 9000, 32768, 40000, 131_072]
        {
            for all in
                [SPLITS, SMALL_BATCH_SPLITS, LARGE_HEAD_SMALL_BATCH_SPLITS, SINGLE_ROW_SPLITS]
            {
                for divisor in [1, 2] {
                    let expected = (1..=longest).map(|context| splits(context, all, divisor)).max();
                    assert_eq!(max_splits(longest, all, divisor), expected.unwrap(), "{longest}");
                }
            }
        }
    }
}
