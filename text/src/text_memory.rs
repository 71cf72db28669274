//! Memory that tokenising may take at a time: what the tokenizer library builds of a text is many times the text.

use super::error::TextError;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Memory that all texts share where no setting says otherwise.
pub const TEXT_MEMORY_DEFAULT: u64 = 1_536 << 20;
/// Time that a text waits for memory that others hold.
const MEMORY_WAIT: Duration = Duration::from_secs(30);

/// A budget in bytes for what tokenising builds. A text takes its share before it is tokenised and gives it back after.
#[derive(Debug)]
pub(super) struct TextMemory {
    limit: u64,
    used: Mutex<u64>,
    returned: Condvar,
}

/// A share of the budget; dropping it gives it back.
#[derive(Debug)]
pub(super) struct MemoryShare<'a> {
    memory: &'a TextMemory,
    bytes: u64,
}

impl TextMemory {
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, used: Mutex::new(0), returned: Condvar::new() }
    }

    /// Bytes that there are in all.
    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// Takes a share, after a wait if others hold too much. A caller must hold no other share meanwhile.
    ///
    /// Errors: a text of `text_bytes` needs more than there is in all, or others held it for too long.
    pub(super) fn acquire(
        &self,
        bytes: u64,
        text_bytes: usize,
    ) -> Result<MemoryShare<'_>, TextError> {
        self.acquire_within(bytes, text_bytes, MEMORY_WAIT)
    }

    /// As `acquire`, with a wait of at most `wait`.
    pub(super) fn acquire_within(
        &self,
        bytes: u64,
        text_bytes: usize,
        wait: Duration,
    ) -> Result<MemoryShare<'_>, TextError> {
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
            let waited = self.returned.wait_timeout(used, left);
            used = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *used += bytes;
        Ok(MemoryShare { memory: self, bytes })
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for MemoryShare<'_> {
    fn drop(&mut self) {
        *self.memory.lock() -= self.bytes;
        self.memory.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_shares_wait_up_to_a_deadline() {
        let memory = TextMemory::new(100);
        let too_much = memory.acquire(101, 5).unwrap_err();
        assert_eq!(too_much, TextError::TooMuchMemory { text_bytes: 5, bytes: 101, limit: 100 });
        let first = memory.acquire(60, 1).unwrap();
        let brief = Duration::from_millis(10);
        let late = memory.acquire_within(41, 1, brief).unwrap_err();
        assert_eq!(late, TextError::MemoryBusy { bytes: 41, used: 60, limit: 100 });
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| memory.acquire(100, 1).map(drop));
            std::thread::sleep(brief);
            drop(first);
            assert_eq!(waiting.join().unwrap(), Ok(()));
        });
        assert_eq!(*memory.lock(), 0);
    }
}
