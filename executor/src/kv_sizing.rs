//! Computes the number of KV blocks of this rank from the configured size and the free memory.

use crate::{ExecutorError, KvCacheSize};
use device::MemInfo;
use ops::RecurrentStateLayout;

/// Memory of a GPU after the warm-up passes, in bytes, from which the KV cache size is computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuMemoryBudget {
    /// Total memory of the device.
    pub(crate) total: u64,
    /// Free memory before the KV cache is allocated.
    pub(crate) free: u64,
    /// Fraction of the total memory that may be in use, counting all processes on the GPU.
    pub(crate) utilization: f64,
    /// Number of graphs that will be captured after the KV cache is allocated.
    pub(crate) graphs: u64,
    /// Bytes of the recurrent states, which are part of the memory in use.
    pub(crate) states: u64,
}

/// Bytes reserved for each captured graph, in which the driver stores kernel launches and parameters.
/// Measured: less than 10 MiB per graph.
const GRAPH_BYTES: u64 = 16 << 20;
/// Fraction of the total memory that is kept free for allocations of the driver.
const SAFETY_FRACTION: f64 = 0.02;

impl GpuMemoryBudget {
    /// Returns the number of KV blocks, each of `block_bytes` bytes, for the configured KV cache size.
    ///
    /// Errors: `NoKvMemory` if no memory is left. The error contains the utilization with which one block
    /// would fit.
    pub(crate) fn blocks(&self, size: KvCacheSize, block_bytes: u64) -> Result<u32, ExecutorError> {
        let used = self.total - self.free.min(self.total);
        let reserved = self.graphs * GRAPH_BYTES + (self.total as f64 * SAFETY_FRACTION) as u64;
        let budget = (self.total as f64 * self.utilization) as u64;
        let available =
            budget.saturating_sub(used + reserved).min(self.free.saturating_sub(reserved));
        let requested = match size {
            KvCacheSize::Auto => {
                return self
                    .require_blocks(available / block_bytes.max(1), used + reserved + block_bytes);
            }
            KvCacheSize::Bytes(bytes) => bytes / block_bytes.max(1),
            KvCacheSize::Blocks(blocks) => u64::from(blocks),
        };
        let max_blocks = self.free.saturating_sub(reserved) / block_bytes.max(1);
        if requested > max_blocks {
            let (needed, free) =
                (requested.saturating_mul(block_bytes), self.free - reserved.min(self.free));
            return Err(ExecutorError::KvTooLarge { needed, free, total: self.total });
        }
        self.require_blocks(requested, used + reserved + block_bytes)
    }

    fn require_blocks(&self, blocks: u64, needed: u64) -> Result<u32, ExecutorError> {
        if blocks > 0 {
            return Ok(u32::try_from(blocks).unwrap_or(u32::MAX));
        }
        let Self { total, free, utilization, states, .. } = *self;
        let sufficient = needed as f64 / total.max(1) as f64;
        if states > 0 {
            return Err(ExecutorError::NoKvMemoryAfterStates {
                total,
                free,
                utilization,
                sufficient,
                states,
            });
        }
        Err(ExecutorError::NoKvMemory { total, free, utilization, sufficient })
    }
}

/// Maximum bytes of an automatically sized KV cache on the CPU, where the KV cache is part of the host's
/// memory.
const AUTO_BYTES_MAX: u64 = 4 << 30;

/// Returns the number of KV blocks, each of `block_bytes` bytes, for the configured KV cache size on a CPU.
/// `ranks` ranks share the host, which has `free_bytes` bytes free.
pub(crate) fn blocks(size: KvCacheSize, free_bytes: u64, block_bytes: u64, ranks: u64) -> u32 {
    let of_bytes = |bytes: u64| u32::try_from(bytes / block_bytes.max(1)).unwrap_or(u32::MAX);
    match size {
        KvCacheSize::Auto => of_bytes(AUTO_BYTES_MAX.min(free_bytes / 4) / ranks.max(1)),
        KvCacheSize::Bytes(bytes) => of_bytes(bytes),
        KvCacheSize::Blocks(blocks) => blocks,
    }
}

/// Returns an error if the KV caches and recurrent states need more than the total memory of the host. `ranks` ranks share
/// the host; each allocates `kv_bytes` bytes for its KV cache and `state_bytes` bytes for states.
///
/// Errors: `KvTooLarge`, if the memory of the host is known. A smaller KV cache may still exceed the free
/// memory, because the operating system allocates memory pages when they are first written.
pub(crate) fn check_host(
    kv_bytes: u64,
    state_bytes: u64,
    ranks: u64,
    host: MemInfo,
) -> Result<(), ExecutorError> {
    let needed = kv_bytes.saturating_add(state_bytes).saturating_mul(ranks.max(1));
    let is_known = host.total_bytes > 0;
    if is_known && needed > host.total_bytes {
        let (free, total) = (host.free_bytes, host.total_bytes);
        return Err(ExecutorError::KvTooLarge { needed, free, total });
    }
    Ok(())
}

/// Returns an error if the recurrent states of all state slots need more than the free memory of the device, of which
/// each of `ranks` ranks takes an equal part. 0 bytes of memory = unknown. The share of a GPU's memory that may be used
/// (`--gpu-memory-utilization`) is checked when the KV cache is sized.
pub(crate) fn check_states(
    states: Option<&RecurrentStateLayout>,
    memory: MemInfo,
    ranks: u64,
) -> Result<(), ExecutorError> {
    let Some(states) = states else { return Ok(()) };
    let (slots, needed, free) =
        (states.slots, states.bytes() as u64, memory.free_bytes / ranks.max(1));
    if memory.total_bytes > 0 && needed > free {
        return Err(ExecutorError::StatesTooLarge { slots, needed, free });
    }
    Ok(())
}

/// Returns an error if the KV pool has fewer than `needed` blocks of `block_tokens` tokens, which one request
/// of `kv_tokens_min` tokens needs in all KV groups together.
pub(crate) fn check(
    blocks: u32,
    needed: u32,
    block_tokens: u32,
    kv_tokens_min: u32,
) -> Result<(), ExecutorError> {
    if blocks < needed {
        return Err(ExecutorError::KvTooSmall { blocks, needed, block_tokens, kv_tokens_min });
    }
    Ok(())
}

/// Returns an error if an automatically sized KV cache, which takes a share of the host's free memory, is too
/// small for one request.
pub(crate) fn check_share(
    blocks: u32,
    block_bytes: u64,
    needed_blocks: u32,
    free: u64,
    kv_tokens_min: u32,
) -> Result<(), ExecutorError> {
    if blocks >= needed_blocks {
        return Ok(());
    }
    let bytes = |blocks: u32| u64::from(blocks).saturating_mul(block_bytes);
    let (taken, needed) = (bytes(blocks), bytes(needed_blocks));
    Err(ExecutorError::KvShareTooSmall { free, taken, kv_tokens_min, needed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_follow_the_configured_size() {
        const GIB: u64 = 1 << 30;
        for (size, free, ranks, expected) in [
            (KvCacheSize::Auto, 100 * GIB, 1, 4 * 1024),
            (KvCacheSize::Auto, 8 * GIB, 1, 2 * 1024),
            (KvCacheSize::Auto, 8 * GIB, 2, 1024),
            (KvCacheSize::Bytes((5 << 20) - 1), GIB, 2, 4),
            (KvCacheSize::Blocks(7), 0, 2, 7),
        ] {
            assert_eq!(blocks(size, free, 1 << 20, ranks), expected, "{size:?}");
        }
    }

    #[test]
    fn gpu_blocks_follow_memory_utilization() {
        const GIB: u64 = 1 << 30;
        let (total, free) = (100 * GIB, 80 * GIB);
        let gpu = GpuMemoryBudget { total, free, utilization: 0.9, graphs: 0, states: 0 };
        // Of 100 GiB, 90 GiB may be used; 20 GiB are in use and 2 GiB are reserved for the driver, so 68
        // blocks of 1 GiB fit.
        assert_eq!(gpu.blocks(KvCacheSize::Auto, GIB).unwrap(), 68);
        assert_eq!(gpu.blocks(KvCacheSize::Blocks(78), GIB).unwrap(), 78);
        let error = gpu.blocks(KvCacheSize::Bytes(79 * GIB), GIB).unwrap_err().to_string();
        assert!(error.contains(&(79 * GIB).to_string()), "{error}");
        let full = GpuMemoryBudget { utilization: 0.2, ..gpu };
        let error = full.blocks(KvCacheSize::Auto, GIB).unwrap_err().to_string();
        assert!(error.contains("0.23"), "20 used, 2 reserved, 1 block: {error}");
        let states = GpuMemoryBudget { states: 15 * GIB, ..full };
        let error = states.blocks(KvCacheSize::Auto, GIB).unwrap_err().to_string();
        assert!(error.contains(&(15 * GIB).to_string()), "{error}");
        assert!(error.contains("--max-num-seqs") && error.contains("0.23"), "{error}");
    }

    #[test]
    fn caches_larger_than_the_host_are_rejected() {
        let host = MemInfo { total_bytes: 8 << 20, free_bytes: 2 << 20 };
        assert!(check_host(8 << 20, 0, 1, host).is_ok());
        assert!(check_host(3 << 20, 1 << 20, 2, host).is_ok());
        for (kv, states, ranks) in [(9, 0, 1), (5, 0, 2), (1 << 40, 0, 1), (8, 1, 1), (3, 2, 2)] {
            let text = check_host(kv << 20, states << 20, ranks, host).unwrap_err().to_string();
            assert!(text.contains("lower --kv-cache-memory-bytes"), "{text}");
        }
    }

    #[test]
    fn too_small_memory_share_is_rejected() {
        let chosen = blocks(KvCacheSize::Auto, 40 << 20, 1 << 20, 1);
        assert!(check_share(chosen, 1 << 20, 10, 40 << 20, 160).is_ok());
        let text = check_share(chosen, 1 << 20, 11, 40 << 20, 170).unwrap_err().to_string();
        for part in ["41943040 bytes", "takes 10485760", "170 tokens", "need 11534336"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.contains("--kv-cache-memory-bytes"), "{text}");
    }

    #[test]
    fn pool_smaller_than_one_request_is_rejected() {
        assert!(check(4, 4, 16, 64).is_ok());
        let text = check(4, 5, 16, 65).unwrap_err().to_string();
        assert!(text.contains("the pool has 4 KV blocks of 16 tokens, 65 tokens"), "{text}");
        assert!(text.contains("need 5"), "{text}");
    }

    #[test]
    fn states_larger_than_the_memory_are_rejected() {
        let layout = RecurrentStateLayout {
            layers: 3,
            slots: 5,
            key_heads: 1,
            value_heads: 2,
            key_dim: 128,
            value_dim: 128,
            conv_width: 4,
        };
        let needed = layout.bytes() as u64;
        assert_eq!(needed, 3 * 5 * (2 * 128 * 128 * 4 + 3 * 512 * 4));
        let memory = |free_bytes| MemInfo { total_bytes: 1 << 40, free_bytes };
        for (memory, ranks) in [
            (MemInfo { total_bytes: 0, free_bytes: 0 }, 2),
            (memory(needed), 1),
            (memory(2 * needed), 2),
        ] {
            assert!(check_states(Some(&layout), memory, ranks).is_ok(), "{memory:?}");
        }
        assert!(check_states(Some(&layout), memory(0), 1).is_err());
        assert!(check_states(Some(&layout), memory(2 * needed - 1), 2).is_err());
        let text = check_states(Some(&layout), memory(needed - 1), 1).unwrap_err().to_string();
        assert!(text.contains("5 state slots") && text.contains("--max-num-seqs"), "{text}");
        assert!(check_states(None, memory(1), 1).is_ok());
    }
}
