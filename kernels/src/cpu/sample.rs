//! Choosing a token out of a row of logits `[V]`, in f32.
//!
//! Owns the arithmetic only: which rules a request has is decided by the caller. Every function looks
//! at one row and nothing else, so a row's token depends on neither its neighbours nor the threads.
//! Only IEEE additions and products are vectorised (never a fused multiply-add), hence every
//! instruction set yields the same bits; the rare logarithms are taken in f64 and rounded once.
//!
//! Noise: Philox4x32-10 (Salmon et al., 2011), keyed by request and countered by vocabulary id and
//! position; the token is the argmax of `l + Gumbel noise`, which is a draw from `softmax(l)`.

mod philox;
mod row;
pub(crate) mod rules;
mod vector;
#[cfg_attr(not(test), expect(dead_code, reason = "no drafter of this release draws its drafts"))]
mod verify;
mod vocab_parallel;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use device::{MatRef, ThreadPool};

use crate::cpu::sample::rules::{RowSampleResult, SampleRequest, SampledRow, TokenChoice};

#[cfg(test)]
use philox::{DRAW_TOKEN, gumbel, philox4x32_10};
use row::{RowScratch, logprobs, sample_token};

/// A number in `(0, 1)` that decides whether the draft at a position stands, where such noise does: the same for each request,
/// position and run.
#[must_use]
pub(super) fn acceptance_noise(key: u64, position: u32) -> f32 {
    philox::unit(philox::word(key, philox::DRAW_ACCEPT, 0, position))
}

/// Answers row by row, the rows spread over the threads, with memory of its own for each thread.
#[derive(Debug)]
pub(super) struct CpuSampler {
    scratch: Vec<Mutex<RowScratch>>,
}

impl CpuSampler {
    pub(super) fn new(threads: usize) -> Self {
        Self { scratch: (0..threads).map(|_| Mutex::default()).collect() }
    }

    /// One answer per row of `logits`, f32 `[n, V]`.
    pub(super) fn sample_rows(
        &self,
        threads: &ThreadPool,
        logits: MatRef<'_>,
        rows: &[SampleRequest<'_>],
    ) -> Vec<RowSampleResult> {
        let answer =
            |r: usize, scratch: &mut RowScratch| sample_row(logits.row(r), &rows[r], scratch);
        self.for_each_row(threads, rows.len(), &answer)
    }

    /// What `work` makes of each of `n` rows.
    fn for_each_row<T: Send>(
        &self,
        threads: &ThreadPool,
        n: usize,
        work: &(dyn Fn(usize, &mut RowScratch) -> T + Sync),
    ) -> Vec<T> {
        let next = AtomicUsize::new(0);
        let made: Vec<Mutex<Option<T>>> = (0..n).map(|_| Mutex::new(None)).collect();
        let run = |thread: usize| {
            let mut scratch = lock(&self.scratch[thread]);
            loop {
                let r = next.fetch_add(1, Ordering::Relaxed);
                let Some(place) = made.get(r) else { return };
                *lock(place) = Some(work(r, &mut scratch));
            }
        };
        if n == 1 {
            run(0);
        } else if n > 1 {
            threads.run(&run);
        }
        let made = made.into_iter();
        made.filter_map(|place| place.into_inner().unwrap_or_else(PoisonError::into_inner))
            .collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn sample_row(l: &[f32], row: &SampleRequest<'_>, scratch: &mut RowScratch) -> RowSampleResult {
    let token = match &row.pick {
        TokenChoice::Sample(rules) => sample_token(l, rules, scratch)?,
        TokenChoice::Known(token) => *token,
    };
    let logprobs = row.logprobs.map(|top| logprobs(l, token, top, scratch)).transpose()?;
    Ok(SampledRow { token, logprobs })
}

#[cfg(test)]
mod tests;
