//! How many batches may wait for one slow subscriber, so that they stay within a number of bytes.
//!
//! The socket counts batches alone. So it is told how many of the size of the newest ones fit: what a subscriber
//! holds up is about that size. Where sizes change while it stands still, it may be a few times as much.

use std::collections::VecDeque;

/// Batches whose sizes are kept where the socket would hold any number.
const BATCHES_MAX: usize = 1_000_000;

/// The newest batches, as far as their bytes fit.
#[derive(Debug)]
pub(super) struct Backlog {
    /// Most batches; 0 = any number.
    hwm: i32,
    bytes_max: u64,
    sizes: VecDeque<u32>,
    bytes: u64,
    /// There were more batches than bytes allow, and have not been as many as the socket allows since.
    short: bool,
    /// What the socket was told last.
    told: i32,
}

impl Backlog {
    /// Of a socket that was told `hwm`.
    pub(super) fn new(hwm: i32, bytes_max: u64) -> Self {
        Self { hwm, bytes_max, sizes: VecDeque::new(), bytes: 0, short: false, told: hwm }
    }

    /// Adds a batch that is about to be sent; `Some` = how many may wait from now on.
    pub(super) fn add(&mut self, bytes: usize) -> Option<i32> {
        let size = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.sizes.push_back(size);
        self.bytes += u64::from(size);
        let most = usize::try_from(self.hwm).ok().filter(|hwm| *hwm > 0).unwrap_or(BATCHES_MAX);
        while self.bytes > self.bytes_max && self.sizes.len() > 1 {
            self.short = true;
            self.drop_oldest();
        }
        if self.sizes.len() > most {
            self.short = false;
            self.drop_oldest();
        }
        let limit = if self.short { half_way_down(self.sizes.len()) } else { self.hwm };
        (limit != self.told).then(|| {
            self.told = limit;
            limit
        })
    }

    fn drop_oldest(&mut self) {
        self.bytes -= u64::from(self.sizes.pop_front().unwrap_or_default());
    }
}

/// The next power of two below, so that the socket is seldom told.
fn half_way_down(batches: usize) -> i32 {
    i32::try_from(1_usize << batches.max(1).ilog2()).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_wait_as_bytes_allow() {
        let mut backlog = Backlog::new(100, 1_000);
        let told: Vec<i32> = (0..50).filter_map(|_| backlog.add(10)).collect();
        assert!(told.is_empty(), "they fit: {told:?}");
        let told: Vec<i32> = (0..20).filter_map(|_| backlog.add(100)).collect();
        assert_eq!(told, [32, 16, 8], "fewer and fewer small ones between");
        assert_eq!(backlog.add(5_000), Some(1), "one may always wait");
        let told: Vec<i32> = (0..200).filter_map(|_| backlog.add(10)).collect();
        assert_eq!(told, [2, 4, 8, 16, 32, 64]);
        let told: Vec<i32> = (0..200).filter_map(|_| backlog.add(1)).collect();
        assert_eq!(told, [100], "as many as the socket was meant to hold");
    }

    #[test]
    fn no_limit_of_batches_is_one_of_bytes() {
        let mut backlog = Backlog::new(0, 1_000);
        let told: Vec<i32> = (0..500).filter_map(|_| backlog.add(10)).collect();
        assert_eq!(told, [64]);
    }
}
