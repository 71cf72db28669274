//! Memory budget for tokenisation: the `tokenizers` crate allocates many times the size of a text.

use super::error::TextError;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Default memory budget of all texts together, in bytes.
pub const TEXT_MEMORY_DEFAULT: u64 = 1_536 << 20;
/// Maximum time that a text waits for memory in use by other texts.
const MEMORY_WAIT: Duration = Duration::from_secs(30);

/// Memory budget for tokenisation, in bytes. The memory that a text needs is acquired from the budget before
/// the text is tokenised, and released afterwards.
#[derive(Debug)]
pub(super) struct TextMemoryBudget {
    limit: u64,
    used: Mutex<u64>,
    released: Condvar,
}

/// Memory acquired from the budget; dropping this value releases it.
#[derive(Debug)]
pub(super) struct TextMemoryPermit<'a> {
    memory: &'a TextMemoryBudget,
    bytes: u64,
}

impl TextMemoryBudget {
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, used: Mutex::new(0), released: Condvar::new() }
    }

    /// Returns the total budget in bytes.
    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// Acquires `bytes` of the budget for a text of `text_bytes` bytes, and waits while too much is in use.
    /// The caller must not already hold part of the budget, otherwise two callers could deadlock.
    ///
    /// Errors: `bytes` exceeds the total budget, or the wait timed out.
    pub(super) fn acquire(
        &self,
        bytes: u64,
        text_bytes: usize,
    ) -> Result<TextMemoryPermit<'_>, TextError> {
        self.acquire_within(bytes, text_bytes, MEMORY_WAIT)
    }

    /// Acquires `bytes` of the budget, and waits at most `wait` until they are available.
    pub(super) fn acquire_within(
        &self,
        bytes: u64,
        text_bytes: usize,
        wait: Duration,
    ) -> Result<TextMemoryPermit<'_>, TextError> {
        let limit = self.limit;
        if bytes > limit {
            return Err(TextError::TooMuchMemory { text_bytes, bytes, limit });
        }
        let since = Instant::now();
        let mut used = self.lock();
        while *used + bytes > limit {
            let left = wait.saturating_sub(since.elapsed());
            if left.is_zero() {
                return Err(TextError::MemoryBusy { bytes, used: *used, limit });
            }
            let waited = self.released.wait_timeout(used, left);
            used = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *used += bytes;
        Ok(TextMemoryPermit { memory: self, bytes })
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TextMemoryPermit<'_> {
    fn drop(&mut self) {
        *self.memory.lock() -= self.bytes;
        self.memory.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_shares_wait_up_to_a_deadline() {
        let memory = TextMemoryBudget::new(100);
        let too_much = memory.acquire(101, 5).unwrap_err();
        assert_eq!(too_much, TextError::TooMuchMemory { text_bytes: 5, bytes: 101, limit: 100 });
        let first = memory.acquire(60, 1).unwrap();
        let brief = Duration::from_millis(10);
        let timed_out = memory.acquire_within(41, 1, brief).unwrap_err();
        assert_eq!(timed_out, TextError::MemoryBusy { bytes: 41, used: 60, limit: 100 });
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| memory.acquire(100, 1).map(drop));
            std::thread::sleep(brief);
            drop(first);
            assert_eq!(waiting.join().unwrap(), Ok(()));
        });
        assert_eq!(*memory.lock(), 0);
    }
}
