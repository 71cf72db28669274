//! Sampling of a token from a row of logits, in f32.
//!
//! Contains the arithmetic only: the caller determines the sampling parameters of a request. Every function
//! reads a single row, so the token of a row depends on neither the other rows nor the number of threads.
//! Only IEEE additions and products are vectorised (never a fused multiply-add), hence every instruction set
//! yields the same bits; the few logarithms are computed in f64 and rounded once.
//!
//! Random numbers are computed by Philox4x32-10 (Salmon et al., 2011), keyed by request, with a counter of
//! token id and position. The sampled token is the argmax of `logit + Gumbel noise`, which is a sample from
//! the softmax of the logits.

mod philox;
mod row;
pub(crate) mod rules;
mod vector;
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "no proposer of this release samples its draft tokens")
)]
mod verify;
mod vocab_parallel;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use device::{MatRef, ThreadPool};

use crate::cpu::sample::rules::{RowSampleResult, SampleOrScore, SampleRequest, SampledRow};

#[cfg(test)]
use philox::{DRAW_TOKEN, gumbel, philox4x32_10};
use row::{RowScratch, logprobs, sample_token};

/// Random number in `(0, 1)` for synthetic acceptance of the draft token at `position`. It depends on the
/// Philox key of the request and on the position only.
#[must_use]
pub(super) fn acceptance_noise(key: u64, position: u32) -> f32 {
    philox::unit(philox::word(key, philox::DRAW_ACCEPT, 0, position))
}

/// Samples rows in parallel on the threads of the pool; each thread has its own scratch memory.
#[derive(Debug)]
pub(super) struct CpuSampler {
    scratch: Vec<Mutex<RowScratch>>,
}

impl CpuSampler {
    pub(super) fn new(threads: usize) -> Self {
        Self { scratch: (0..threads).map(|_| Mutex::default()).collect() }
    }

    /// Samples one token for each row of `logits`, f32 `[rows, vocab_size]`.
    pub(super) fn sample_rows(
        &self,
        threads: &ThreadPool,
        logits: MatRef<'_>,
        requests: &[SampleRequest<'_>],
    ) -> Vec<RowSampleResult> {
        let sample =
            |r: usize, scratch: &mut RowScratch| sample_row(logits.row(r), &requests[r], scratch);
        self.for_each_row(threads, requests.len(), sample)
    }

    /// Calls `work` for each of `n` rows in parallel and returns the results in order.
    fn for_each_row<T: Send>(
        &self,
        threads: &ThreadPool,
        n: usize,
        work: impl Fn(usize, &mut RowScratch) -> T + Sync,
    ) -> Vec<T> {
        let next = AtomicUsize::new(0);
        let results: Vec<Mutex<Option<T>>> = (0..n).map(|_| Mutex::new(None)).collect();
        let run = |thread: usize| {
            let mut scratch = lock(&self.scratch[thread]);
            loop {
                let r = next.fetch_add(1, Ordering::Relaxed);
                let Some(result) = results.get(r) else { return };
                *lock(result) = Some(work(r, &mut scratch));
            }
        };
        if n == 1 {
            run(0);
        } else if n > 1 {
            threads.run(&run);
        }
        let results = results.into_iter();
        results
            .filter_map(|result| result.into_inner().unwrap_or_else(PoisonError::into_inner))
            .collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn sample_row(l: &[f32], request: &SampleRequest<'_>, scratch: &mut RowScratch) -> RowSampleResult {
    let token = match &request.choice {
        SampleOrScore::Sample(rules) => sample_token(l, rules, scratch)?,
        SampleOrScore::Score(token) => *token,
    };
    let logprobs = request.logprobs.map(|top| logprobs(l, token, top, scratch)).transpose()?;
    Ok(SampledRow { token, logprobs })
}

#[cfg(test)]
mod tests;
