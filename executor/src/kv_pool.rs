//! How many KV blocks this rank holds.

use crate::{ExecutorError, KvSize};

/// Most bytes the KV cache takes unless told otherwise; it lies in the memory everything else uses.
const AUTO_BYTES_MAX: u64 = 4 << 30;

/// Blocks of `block_bytes` for the configured size on a machine with so many bytes free.
pub(crate) fn blocks(size: KvSize, free_bytes: u64, block_bytes: u64) -> u32 {
    let of_bytes = |bytes: u64| u32::try_from(bytes / block_bytes.max(1)).unwrap_or(u32::MAX);
    match size {
        KvSize::Auto => of_bytes(AUTO_BYTES_MAX.min(free_bytes / 4)),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_follow_the_configured_size() {
        const GIB: u64 = 1 << 30;
        for (size, free, expected) in [
            (KvSize::Auto, 100 * GIB, 4 * 1024),
            (KvSize::Auto, 8 * GIB, 2 * 1024),
            (KvSize::Bytes((5 << 20) - 1), GIB, 4),
            (KvSize::Blocks(7), 0, 7),
        ] {
            assert_eq!(blocks(size, free, 1 << 20), expected, "{size:?}");
        }
    }

    #[test]
    fn a_pool_below_one_request_is_refused_with_the_length_that_fits() {
        assert!(check(4, 16, 64).is_ok());
        let text = check(4, 16, 65).unwrap_err().to_string();
        assert!(text.contains("max_model_len 65") && text.contains("at most 64"), "{text}");
    }
}
