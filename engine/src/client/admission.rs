//! Whether one more request is taken: counters against limits, before and after tokenising.
//!
//! A `AdmissionPermit` is what a request holds of the counters; dropping it gives everything back, so no
//! path can leak. An accepted request is never refused later for load.

use super::prefill_rate::PrefillRate;
use grammar::sync::atomic::{AtomicU64, Ordering};
use grammar::sync::{Mutex, lock};
use std::mem;
use std::sync::Arc;
use std::time::Instant;

/// Caps over all requests in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// Requests waiting or running (`--max-num-queued-reqs`).
    pub requests: u64,
    /// Prompt tokens that have not been prefilled (`--max-num-queued-tokens`).
    pub prefill_tokens: u64,
    /// Bytes of bodies held or being read, and of what requests make of them and hold (`--max-queued-bytes`).
    pub bytes: u64,
}

/// Which cap a request would have passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverloadRejection {
    /// Slug of the limit.
    pub reason: &'static str,
    /// What is counted now.
    pub current: u64,
    /// What may be counted.
    pub cap: u64,
    /// Seconds after which trying again is sensible.
    pub retry_after_s: u32,
}

/// Counters of what is in flight.
#[derive(Debug)]
pub struct AdmissionController {
    limits: AdmissionLimits,
    requests: AtomicU64,
    prefill_tokens: AtomicU64,
    bytes: AtomicU64,
    rate: Mutex<PrefillRate>,
}

impl AdmissionController {
    /// Nothing in flight.
    pub fn new(limits: AdmissionLimits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            requests: AtomicU64::new(0),
            prefill_tokens: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            rate: Mutex::default(),
        })
    }

    /// Holds nothing yet: for a body that is going to be read.
    pub fn queue_body(self: &Arc<Self>) -> QueuedBytes {
        QueuedBytes { admission: Arc::clone(self), bytes: 0 }
    }

    /// Counts a request whose body is there, before its prompt is known.
    ///
    /// Errors: there is no room for one more.
    pub fn admit(
        self: &Arc<Self>,
        body: QueuedBytes,
    ) -> Result<AdmissionPermit, OverloadRejection> {
        self.add(&self.requests, 1, self.limits.requests, "max_num_queued_reqs")?;
        Ok(AdmissionPermit {
            admission: Arc::clone(self),
            requests: 1,
            prefill_tokens: 0,
            queued_bytes: body,
            admitted_at: Instant::now(),
        })
    }

    /// Requests in flight.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Prompt tokens that have not been prefilled.
    pub fn prefill_tokens(&self) -> u64 {
        self.prefill_tokens.load(Ordering::Relaxed)
    }

    fn add(
        &self,
        counter: &AtomicU64,
        amount: u64,
        cap: u64,
        reason: &'static str,
    ) -> Result<(), OverloadRejection> {
        let within = |current: u64| current.checked_add(amount).filter(|sum| *sum <= cap);
        let tried = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within);
        tried.map(|_| ()).map_err(|current| OverloadRejection {
            reason,
            current,
            cap,
            retry_after_s: self.retry_after_s(),
        })
    }

    /// How long the tokens in prefill will take at the measured rate, within 1 and 60 seconds.
    fn retry_after_s(&self) -> u32 {
        let seconds = lock(&self.rate).seconds_for(self.prefill_tokens());
        (seconds.ceil() as u32).clamp(1, 60)
    }

    /// Prompt tokens left the queue, `prefilled` or not.
    fn leave_prefill(&self, tokens: u64, prefilled: bool) {
        let left = self.prefill_tokens.fetch_sub(tokens, Ordering::Relaxed) - tokens;
        let done = if prefilled { tokens } else { 0 };
        lock(&self.rate).record(done, left, Instant::now());
    }
}

/// Bytes that are counted for one request: of its body, as they come (many slow clients with large bodies are a load
/// before any of them is a request), and of what it makes of them.
#[derive(Debug)]
pub struct QueuedBytes {
    admission: Arc<AdmissionController>,
    bytes: u64,
}

impl QueuedBytes {
    /// Counts bytes that have come.
    ///
    /// Errors: there is no room for them.
    pub fn grow(&mut self, bytes: u64) -> Result<(), OverloadRejection> {
        let admission = &self.admission;
        admission.add(&admission.bytes, bytes, admission.limits.bytes, "max_queued_bytes")?;
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for QueuedBytes {
    fn drop(&mut self) {
        self.admission.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// One HTTP request's share of the counters.
#[derive(Debug)]
pub struct AdmissionPermit {
    admission: Arc<AdmissionController>,
    requests: u64,
    prefill_tokens: u64,
    queued_bytes: QueuedBytes,
    admitted_at: Instant,
}

impl AdmissionPermit {
    /// When its body was there: what clients wait for counts from here.
    pub fn admitted_at(&self) -> Instant {
        self.admitted_at
    }

    /// Requests in flight at most, over the whole server.
    pub fn requests_max(&self) -> u64 {
        self.admission.limits.requests
    }

    /// Counts what is known after tokenising: `requests` engine requests in all, and their tokens.
    ///
    /// Errors: the first limit that has no room.
    pub fn grow(&mut self, requests: u64, prefill_tokens: u64) -> Result<(), OverloadRejection> {
        let admission = Arc::clone(&self.admission);
        let (limits, more) = (admission.limits, requests.saturating_sub(self.requests));
        admission.add(&admission.requests, more, limits.requests, "max_num_queued_reqs")?;
        self.requests += more;
        let (counter, cap) = (&admission.prefill_tokens, limits.prefill_tokens);
        admission.add(counter, prefill_tokens, cap, "max_num_queued_tokens")?;
        self.prefill_tokens += prefill_tokens;
        lock(&admission.rate).prompt_queued(Instant::now());
        Ok(())
    }

    /// Counts what the request makes of its body and holds as long as it lives: ids, parsed values, answers.
    ///
    /// Errors: there is no room for it.
    pub fn reserve_bytes(&mut self, bytes: u64) -> Result<(), OverloadRejection> {
        self.queued_bytes.grow(bytes)
    }

    /// Gives away the bytes that are counted: for a reply that takes memory until it is sent.
    pub(super) fn take_held(&mut self) -> QueuedBytes {
        let nothing = self.admission.queue_body();
        mem::replace(&mut self.queued_bytes, nothing)
    }

    /// Some prompt tokens have been `prefilled`, or never will be.
    pub(super) fn release_tokens(&mut self, tokens: u64, prefilled: bool) {
        let tokens = tokens.min(self.prefill_tokens);
        self.prefill_tokens -= tokens;
        self.admission.leave_prefill(tokens, prefilled);
    }

    /// One of the requests has ended.
    pub(super) fn release_request(&mut self) {
        if self.requests > 0 {
            self.requests -= 1;
            self.admission.requests.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for AdmissionPermit {
    fn drop(&mut self) {
        self.admission.requests.fetch_sub(self.requests, Ordering::Relaxed);
        if self.prefill_tokens > 0 {
            self.admission.leave_prefill(self.prefill_tokens, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_rejects_and_every_permit_releases() {
        let limits = AdmissionLimits { requests: 4, prefill_tokens: 100, bytes: 50 };
        let admission = AdmissionController::new(limits);
        let body = |bytes: u64| {
            let mut body = admission.queue_body();
            body.grow(bytes / 2).and_then(|()| body.grow(bytes - bytes / 2)).map(|()| body)
        };
        let enter = |bytes| admission.admit(body(bytes)?);
        let mut a = enter(10).unwrap();
        a.grow(3, 90).unwrap();
        let mut b = enter(10).unwrap();
        assert_eq!(enter(1).unwrap_err().reason, "max_num_queued_reqs");
        assert_eq!(b.grow(1, 11).unwrap_err().reason, "max_num_queued_tokens");
        a.release_tokens(90, true);
        a.release_request();
        b.grow(1, 11).unwrap();
        assert_eq!(enter(31).unwrap_err().reason, "max_queued_bytes");
        assert_eq!(b.reserve_bytes(31).unwrap_err().reason, "max_queued_bytes");
        b.reserve_bytes(5).unwrap();
        let half_read = body(25).unwrap();
        assert_eq!(body(1).unwrap_err().reason, "max_queued_bytes");
        drop((a, b, half_read));
        let counts = (admission.requests(), admission.prefill_tokens());
        assert_eq!((counts, admission.bytes.load(Ordering::Relaxed)), ((0, 0), 0));
    }
}
