//! How many KV blocks this rank holds.

use crate::{ExecutorError, KvSize};

/// What is known about a GPU's memory after the warm-up, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuMemory {
    /// Of the device.
    pub(crate) total: u64,
    /// Free, were there no KV cache.
    pub(crate) free: u64,
    /// Share of the total to use, by all processes.
    pub(crate) utilization: f64,
    /// Steps that will be recorded.
    pub(crate) graphs: u64,
}

/// Launches and parameters of one recorded step, as drivers keep them; measured below 10 MiB.
const GRAPH_BYTES: u64 = 16 << 20;
/// Parts of the total that stay free for what drivers allocate behind our back.
const SAFETY: f64 = 0.02;

impl GpuMemory {
    /// Blocks of `block_bytes` for the configured size.
    ///
    /// Errors: `NoRoom` with the share that would hold one block, if nothing is left.
    pub(crate) fn blocks(&self, size: KvSize, block_bytes: u64) -> Result<u32, ExecutorError> {
        let used = self.total - self.free.min(self.total);
        let aside = self.graphs * GRAPH_BYTES + (self.total as f64 * SAFETY) as u64;
        let budget = (self.total as f64 * self.utilization) as u64;
        let left = budget.saturating_sub(used + aside).min(self.free.saturating_sub(aside));
        let wanted = match size {
            KvSize::Auto => {
                return self.some(left / block_bytes.max(1), used + aside + block_bytes);
            }
            KvSize::Bytes(bytes) => bytes / block_bytes.max(1),
            KvSize::Blocks(blocks) => u64::from(blocks),
        };
        let most = self.free.saturating_sub(aside) / block_bytes.max(1);
        if wanted > most {
            let (needed, free) =
                (wanted.saturating_mul(block_bytes), self.free - aside.min(self.free));
            return Err(ExecutorError::KvTooLarge { needed, free, total: self.total });
        }
        self.some(wanted, used + aside + block_bytes)
    }

    fn some(&self, blocks: u64, needed: u64) -> Result<u32, ExecutorError> {
        if blocks > 0 {
            return Ok(u32::try_from(blocks).unwrap_or(u32::MAX));
        }
        let Self { total, free, utilization, .. } = *self;
        let sufficient = needed as f64 / total.max(1) as f64;
        Err(ExecutorError::NoRoom { total, free, utilization, sufficient })
    }
}

/// Most bytes the KV cache takes unless told otherwise; it lies in the memory everything else uses.
const AUTO_BYTES_MAX: u64 = 4 << 30;

/// Blocks of `block_bytes` for the configured size on a machine with so many bytes free, which `ranks` share.
pub(crate) fn blocks(size: KvSize, free_bytes: u64, block_bytes: u64, ranks: u64) -> u32 {
    let of_bytes = |bytes: u64| u32::try_from(bytes / block_bytes.max(1)).unwrap_or(u32::MAX);
    match size {
        KvSize::Auto => of_bytes(AUTO_BYTES_MAX.min(free_bytes / 4) / ranks.max(1)),
        KvSize::Bytes(bytes) => of_bytes(bytes),
        KvSize::Blocks(blocks) => blocks,
    }
}

/// Refuses a pool that cannot hold one request of the longest length.
pub(crate) fn check(
    blocks: u32,
    block_tokens: u32,
    max_model_len: u32,
) -> Result<(), ExecutorError> {
    let longest = u64::from(blocks) * u64::from(block_tokens);
    if longest < u64::from(max_model_len) {
        return Err(ExecutorError::KvTooSmall { blocks, block_tokens, max_model_len, longest });
    }
    Ok(())
}

/// Refuses a pool whose size was left to a host with too little free memory to hold one request.
pub(crate) fn check_share(
    blocks: u32,
    block_bytes: u64,
    needed_blocks: u32,
    free: u64,
    max_model_len: u32,
) -> Result<(), ExecutorError> {
    if blocks >= needed_blocks {
        return Ok(());
    }
    let bytes = |blocks: u32| u64::from(blocks).saturating_mul(block_bytes);
    let (taken, needed) = (bytes(blocks), bytes(needed_blocks));
    Err(ExecutorError::KvShareTooSmall { free, taken, max_model_len, needed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_follow_the_configured_size() {
        const GIB: u64 = 1 << 30;
        for (size, free, ranks, expected) in [
            (KvSize::Auto, 100 * GIB, 1, 4 * 1024),
            (KvSize::Auto, 8 * GIB, 1, 2 * 1024),
            (KvSize::Auto, 8 * GIB, 2, 1024),
            (KvSize::Bytes((5 << 20) - 1), GIB, 2, 4),
            (KvSize::Blocks(7), 0, 2, 7),
        ] {
            assert_eq!(blocks(size, free, 1 << 20, ranks), expected, "{size:?}");
        }
    }

    #[test]
    fn a_gpu_gives_what_its_share_leaves() {
        const GIB: u64 = 1 << 30;
        let gpu = GpuMemory { total: 100 * GIB, free: 80 * GIB, utilization: 0.9, graphs: 0 };
        // 90 - 20 used - 2 aside.
        assert_eq!(gpu.blocks(KvSize::Auto, GIB).unwrap(), 68);
        assert_eq!(gpu.blocks(KvSize::Blocks(78), GIB).unwrap(), 78);
        let error = gpu.blocks(KvSize::Bytes(79 * GIB), GIB).unwrap_err().to_string();
        assert!(error.contains(&(79 * GIB).to_string()), "{error}");
        let full = GpuMemory { utilization: 0.2, ..gpu };
        let error = full.blocks(KvSize::Auto, GIB).unwrap_err().to_string();
        assert!(error.contains("0.23"), "20 used, 2 aside, 1 block: {error}");
    }

    #[test]
    fn a_share_of_little_memory_is_rejected_with_the_numbers() {
        let chosen = blocks(KvSize::Auto, 40 << 20, 1 << 20, 1);
        assert!(check_share(chosen, 1 << 20, 10, 40 << 20, 160).is_ok());
        let text = check_share(chosen, 1 << 20, 11, 40 << 20, 170).unwrap_err().to_string();
        for part in ["41943040 bytes", "takes 10485760", "max_model_len 170", "needs 11534336"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.contains("--kv-cache-memory-bytes"), "{text}");
    }

    #[test]
    fn a_pool_below_one_request_is_refused_with_the_length_that_fits() {
        assert!(check(4, 16, 64).is_ok());
        let text = check(4, 16, 65).unwrap_err().to_string();
        assert!(text.contains("max_model_len 65") && text.contains("at most 64"), "{text}");
    }
}
