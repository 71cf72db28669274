//! Admission control: compares the load of all requests in flight with limits, before and after tokenisation.
//!
//! An [`AdmissionPermit`] represents the load that one HTTP request has added to the load counters. Dropping
//! the permit subtracts this load again, so no code path can leave it in the counters. An accepted request is
//! not rejected later because of load.

use super::prefill_rate::PrefillRate;
use grammar::sync::atomic::{AtomicU64, Ordering};
use grammar::sync::{Mutex, lock};
use std::mem;
use std::sync::Arc;
use std::time::Instant;

/// Admission limits. Each limit applies to the sum over all requests in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// Maximum number of requests waiting or running (`--max-num-queued-reqs`).
    pub requests: u64,
    /// Maximum number of prompt tokens not yet prefilled (`--max-num-queued-tokens`).
    pub prefill_tokens: u64,
    /// Maximum number of bytes of request bodies (received or being read) and of the data derived from them
    /// (`--max-queued-bytes`).
    pub bytes: u64,
}

/// Rejection of a request that would exceed an admission limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverloadRejection {
    /// Name of the exceeded limit, for error bodies and metrics.
    pub reason: &'static str,
    /// Value of the load counter that the limit bounds, excluding the rejected load.
    pub current: u64,
    /// Value of the exceeded limit.
    pub cap: u64,
    /// Seconds after which the client should retry.
    pub retry_after_s: u32,
}

/// Admits or rejects requests: compares the load counters of all requests in flight with the limits.
#[derive(Debug)]
pub struct AdmissionController {
    limits: AdmissionLimits,
    requests: AtomicU64,
    prefill_tokens: AtomicU64,
    bytes: AtomicU64,
    rate: Mutex<PrefillRate>,
}

impl AdmissionController {
    /// Creates a controller with all load counters at zero.
    pub fn new(limits: AdmissionLimits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            requests: AtomicU64::new(0),
            prefill_tokens: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            rate: Mutex::default(),
        })
    }

    /// Creates a permit of zero bytes for a request body that is about to be read; `grow` adds the received
    /// bytes.
    pub fn queue_body(self: &Arc<Self>) -> QueuedBytesPermit {
        QueuedBytesPermit { admission: Arc::clone(self), bytes: 0 }
    }

    /// Adds one request to the load counters, after its body was received and before its prompt is tokenised.
    ///
    /// Errors: the limit of requests is reached.
    pub fn admit(
        self: &Arc<Self>,
        body: QueuedBytesPermit,
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

    /// Number of requests in flight.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Number of prompt tokens not yet prefilled.
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
        let updated = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within);
        updated.map(|_| ()).map_err(|current| OverloadRejection {
            reason,
            current,
            cap,
            retry_after_s: self.retry_after_s(),
        })
    }

    /// Returns the estimated time to prefill the queued prompt tokens at the measured rate, from 1 to 60
    /// seconds.
    fn retry_after_s(&self) -> u32 {
        let seconds = lock(&self.rate).seconds_for(self.prefill_tokens());
        (seconds.ceil() as u32).clamp(1, 60)
    }

    /// Subtracts `tokens` prompt tokens from the counter of queued prompt tokens. `prefilled`: the tokens
    /// were prefilled; otherwise their request ended before the prefill.
    fn leave_prefill(&self, tokens: u64, prefilled: bool) {
        let left = self.prefill_tokens.fetch_sub(tokens, Ordering::Relaxed) - tokens;
        let done = if prefilled { tokens } else { 0 };
        lock(&self.rate).record(done, left, Instant::now());
    }
}

/// Permit for the bytes that one HTTP request adds to the byte counter: its body, and the data derived from
/// the body. The body is counted while it is being received, because many slow clients with large bodies
/// use memory before any of their requests is complete.
#[derive(Debug)]
pub struct QueuedBytesPermit {
    admission: Arc<AdmissionController>,
    bytes: u64,
}

impl QueuedBytesPermit {
    /// Adds received bytes to the count.
    ///
    /// Errors: the limit of bytes is exceeded.
    pub fn grow(&mut self, bytes: u64) -> Result<(), OverloadRejection> {
        let admission = &self.admission;
        admission.add(&admission.bytes, bytes, admission.limits.bytes, "max_queued_bytes")?;
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for QueuedBytesPermit {
    fn drop(&mut self) {
        self.admission.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Permit of an accepted HTTP request: the load that the request has added to the load counters. Dropping the
/// permit subtracts this load.
#[derive(Debug)]
pub struct AdmissionPermit {
    admission: Arc<AdmissionController>,
    requests: u64,
    prefill_tokens: u64,
    queued_bytes: QueuedBytesPermit,
    admitted_at: Instant,
}

impl AdmissionPermit {
    /// Time at which the request body was complete; request latency is measured from this time.
    pub fn admitted_at(&self) -> Instant {
        self.admitted_at
    }

    /// Limit of the number of requests in flight in the whole server.
    pub fn requests_max(&self) -> u64 {
        self.admission.limits.requests
    }

    /// Adds the load that is known after tokenisation: the engine requests of the HTTP request (`requests` in
    /// total) and their prompt tokens.
    ///
    /// Errors: the first limit that is exceeded.
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

    /// Adds memory that the request holds until it ends: token ids, parsed values, responses.
    ///
    /// Errors: the limit of bytes is exceeded.
    pub fn reserve_bytes(&mut self, bytes: u64) -> Result<(), OverloadRejection> {
        self.queued_bytes.grow(bytes)
    }

    /// Moves the byte count of the request from the permit to the response: the response uses the counted
    /// memory until it is sent, which may be after the permit is dropped.
    pub(super) fn take_queued_bytes(&mut self) -> QueuedBytesPermit {
        let empty = self.admission.queue_body();
        mem::replace(&mut self.queued_bytes, empty)
    }

    /// Subtracts prompt tokens from the counter of tokens not yet prefilled. `prefilled`: the tokens were
    /// prefilled; otherwise their request ended before the prefill.
    pub(super) fn release_tokens(&mut self, tokens: u64, prefilled: bool) {
        let tokens = tokens.min(self.prefill_tokens);
        self.prefill_tokens -= tokens;
        self.admission.leave_prefill(tokens, prefilled);
    }

    /// Subtracts one finished request from the counter of requests in flight.
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
