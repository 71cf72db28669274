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

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::pool::ThreadPool;
use crate::Mat;
use crate::cpu::sample::rules::{Pick, Picked, RowAnswer, RowRequest};

#[cfg(test)]
use philox::{DRAW_TOKEN, gumbel, philox4x32_10};
use row::{Scratch, choose, logprobs};

/// Answers row by row, the rows spread over the threads, with memory of its own for each thread.
#[derive(Debug)]
pub(super) struct Sampler {
    scratch: Vec<Mutex<Scratch>>,
}

impl Sampler {
    pub(super) fn new(threads: usize) -> Self {
        Self { scratch: (0..threads).map(|_| Mutex::default()).collect() }
    }

    /// One answer per row of `logits`, f32 `[n, V]`.
    pub(super) fn answer(
        &self,
        threads: &ThreadPool,
        logits: Mat<'_>,
        rows: &[RowRequest<'_>],
    ) -> Vec<RowAnswer> {
        let next = AtomicUsize::new(0);
        let answers: Vec<Mutex<Option<RowAnswer>>> =
            rows.iter().map(|_| Mutex::default()).collect();
        let work = |thread: usize| {
            let mut scratch = lock(&self.scratch[thread]);
            loop {
                let r = next.fetch_add(1, Ordering::Relaxed);
                let Some(row) = rows.get(r) else { return };
                *lock(&answers[r]) = Some(answer_row(logits.row(r), row, &mut scratch));
            }
        };
        if rows.len() == 1 {
            work(0);
        } else {
            threads.run(&work);
        }
        let answer = |answer: Mutex<Option<RowAnswer>>| {
            answer.into_inner().unwrap_or_else(PoisonError::into_inner)
        };
        answers.into_iter().filter_map(answer).collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn answer_row(l: &[f32], row: &RowRequest<'_>, scratch: &mut Scratch) -> RowAnswer {
    let token = match &row.pick {
        Pick::Choose(rules) => choose(l, rules, scratch)?,
        Pick::Known(token) => *token,
    };
    let logprobs = row.logprobs.map(|top| logprobs(l, token, top, scratch)).transpose()?;
    Ok(Picked { token, logprobs })
}

#[cfg(test)]
mod tests;
