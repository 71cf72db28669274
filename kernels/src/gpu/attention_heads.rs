//! Partition of query heads among thread blocks, and the range of keys that a launch of attention reads.

use device::MatRef;
use device::gpu::{KernelDefine, KernelLaunch};

use super::attention::TILE;
use crate::AttentionKeyRange;

/// Maximum number of query heads per block with heads of more than `SMALL_HEAD` channels: the registers of a warp
/// and the shared memory of a block hold the outputs of at most this number of queries.
const LARGE_HEAD_QUERIES: usize = 8;
const SMALL_HEAD: usize = 128;
/// Number of warps per block of the decode kernel; must match `WARPS` in attention_decode.hip. With heads of more than
/// `LARGE_HEAD` channels, shared memory holds the tiles and partial results of two warps.
const DECODE_WARPS: usize = 4;
const LARGE_HEAD_DECODE_WARPS: usize = 2;
pub(super) const LARGE_HEAD: usize = 256;

/// Partition of the query heads of a KV head: `sharers` groups of `heads` query heads, each of which reads the
/// keys of the KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueryHeadPartition {
    pub(super) heads: usize,
    pub(super) sharers: usize,
}

impl QueryHeadPartition {
    /// Returns the partition of `heads` query heads into the fewest groups that blocks can process.
    pub(super) fn new(heads: usize, head_dim: usize) -> Self {
        let most = max_queries(head_dim);
        let sharers = (heads.div_ceil(most).max(1)..=heads).find(|n| heads.is_multiple_of(*n));
        let sharers = sharers.unwrap_or(1);
        Self { heads: heads / sharers, sharers }
    }
}

/// Maximum number of queries that a block of the decode kernel processes together.
pub(super) fn max_queries(head_dim: usize) -> usize {
    if head_dim > SMALL_HEAD { LARGE_HEAD_QUERIES } else { TILE }
}

/// Returns the number of warps per block of the decode kernel.
pub(super) fn decode_warps(head_dim: usize) -> usize {
    if head_dim > LARGE_HEAD { LARGE_HEAD_DECODE_WARPS } else { DECODE_WARPS }
}

/// Returns the maximum number of keys that the split-KV kernels read of a row with up to `max_context_len` keys:
/// a window and the rest of the tile in which it begins.
pub(super) fn max_keys_read(max_context_len: usize, keys: AttentionKeyRange) -> usize {
    let window = keys.window.map_or(usize::MAX, |window| window.saturating_add(TILE - 1));
    max_context_len.min(window)
}

/// Returns the size of the window as an argument of the kernels.
pub(super) fn window_argument(window: usize) -> u32 {
    u32::try_from(window).unwrap_or(u32::MAX)
}

/// Returns the defines for which the kernels have arguments for a window and for sinks
/// (`attention/key_range.h`).
pub(super) fn key_range_defines(
    keys: AttentionKeyRange,
    has_sinks: bool,
) -> impl Iterator<Item = KernelDefine> {
    let windowed = keys.window.is_some().then_some(("WINDOWED", 1));
    windowed.into_iter().chain(has_sinks.then_some(("SINKS", 1)))
}

/// Appends the size of the window, if there is one, and the address of the sinks, if there are sinks.
pub(super) fn append_key_range(
    launch: KernelLaunch,
    keys: AttentionKeyRange,
    sinks: Option<MatRef<'_>>,
) -> KernelLaunch {
    let launch = match keys.window {
        Some(window) => launch.u32(window_argument(window)),
        None => launch,
    };
    match sinks {
        Some(sinks) => launch.arg(sinks),
        None => launch,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_heads_are_cut_into_the_fewest_groups() {
        let of = |heads, head_dim| {
            let QueryHeadPartition { heads, sharers } = QueryHeadPartition::new(heads, head_dim);
            (heads, sharers)
        };
        for heads in 1..=16 {
            assert_eq!(of(heads, 128), (heads, 1));
        }
        assert_eq!(of(16, 256), (8, 2));
        assert_eq!(of(10, 256), (5, 2));
        assert_eq!(of(8, 512), (8, 1));
        assert_eq!(of(16, 512), (8, 2));
        assert_eq!(of(48, 64), (16, 3));
        assert_eq!(of(71, 64), (1, 71));
    }

    #[test]
    fn keys_of_a_window_begin_within_a_tile() {
        let keys = |window| AttentionKeyRange { first_position: 0, window };
        assert_eq!(max_keys_read(4096, keys(None)), 4096);
        assert_eq!(max_keys_read(4096, keys(Some(128))), 143);
        assert_eq!(max_keys_read(100, keys(Some(128))), 100);
        assert_eq!(max_keys_read(100, keys(Some(usize::MAX))), 100);
    }
}
