//! Events and block lifetimes that the cache records.

use super::KvCache;
use crate::BlockLifetime;
use protocol::KvEvent;

impl KvCache {
    /// Returns whether `take_events` would return events.
    #[inline]
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Returns the changes of the prefix index since the last call, in order.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    /// Sets the current time in milliseconds since an arbitrary origin. The time affects only block
    /// lifetimes.
    #[inline]
    pub fn set_time(&mut self, now_ms: u64) {
        if let Some(sampler) = &mut self.lifetime_sampler {
            sampler.set_time(now_ms);
        }
    }

    /// Returns whether `take_lifetimes` would return lifetimes.
    #[inline]
    pub fn has_lifetimes(&self) -> bool {
        self.lifetime_sampler.as_ref().is_some_and(|sampler| sampler.has_lifetimes())
    }

    /// Returns the lifetimes of sampled blocks evicted since the last call, in order.
    pub fn take_lifetimes(&mut self) -> Vec<BlockLifetime> {
        self.lifetime_sampler.as_mut().map_or_else(Vec::new, |sampler| sampler.take_lifetimes())
    }
}
