//! Vocab-parallel sampling: every rank has the logits of a vocabulary shard. The tokens are those sampled
//! from whole rows, for an exchange of a few words per rank.
//!
//! In one all-gather every rank sends what the sampling rules need ([`CandidateLayout`]): token ids with
//! their values if these decide (the most likely id; with noise, the id with the largest noisy logit), its
//! top ids if a filter cuts the vocabulary, and the probability mass of its shard. In flat rows top-p or
//! min-p can keep ids that are not among these candidates: such rows, and rows with more words to exchange
//! than logits, are gathered whole. A last all-gather counts the ids before a token if its rank among all ids
//! is requested.
//!
//! All ranks compute from the same words in the order of ranks, so they agree to the bit. Token ids equal
//! those sampled from whole rows; sums of log-probabilities differ in the order of summation.

mod candidate_layout;
mod local_candidates;
mod merge;
mod rank_candidates;

use candidate_layout::CandidateLayout;
use device::{DeviceError, MatMut, MatRef, ThreadPool};
use local_candidates::local_candidates;
use merge::{MergedToken, merge};
use rank_candidates::RankCandidates;

use super::row::{RankedToken, RowScratch};
use super::rules::{
    RowLogprobs, RowSampleResult, SampleError, SampleRequest, SampledRow, TokenChoice,
};
use super::{CpuSampler, vector};
use crate::{GatherFn, VocabShard};

/// Logits rows of a call, sharded by vocabulary.
struct ShardedRows<'a> {
    sampler: &'a CpuSampler,
    threads: &'a ThreadPool,
    /// f32 `[n, part.cols]`
    logits: MatRef<'a>,
    vocab_shard: &'a VocabShard,
    requests: &'a [SampleRequest<'a>],
}

/// Merged result of a row; `None` = undecided, the row must be gathered whole.
type MergeOutcome = Option<Result<MergedToken, SampleError>>;

impl CpuSampler {
    /// Samples one token per row of `logits`, f32 `[n, part.cols]`; the result is equal on all ranks.
    pub(crate) fn sample_vocab_parallel(
        &self,
        threads: &ThreadPool,
        (logits, part): (MatRef<'_>, &VocabShard),
        asked: &[SampleRequest<'_>],
        gather: &mut GatherFn<'_>,
    ) -> Result<Vec<RowSampleResult>, DeviceError> {
        let rows =
            ShardedRows { sampler: self, threads, logits, vocab_shard: part, requests: asked };
        let outcomes = rows.outcomes(gather)?;
        let mut whole = rows.sample_full_rows(&outcomes, gather)?.into_iter();
        let mut places = rows.token_ranks(&outcomes, gather)?.into_iter();
        let answer = |(outcome, row): (MergeOutcome, &SampleRequest<'_>)| match outcome {
            None => whole.next().expect("one for each row without an outcome"),
            Some(Err(unusable)) => Err(unusable),
            Some(Ok(found)) if counts(row) => {
                Ok(sampled_row(found, places.next().expect("one for each row that counts")))
            }
            Some(Ok(found)) => Ok(sampled_row(found, 1)),
        };
        Ok(outcomes.into_iter().zip(asked).map(answer).collect())
    }
}

/// Whether the ids before the token must be counted for its rank: the most likely id has none before it.
fn counts(row: &SampleRequest<'_>) -> bool {
    let likeliest = match &row.pick {
        TokenChoice::Known(_) => false,
        TokenChoice::Sample(rules) => rules.draw.is_none() && !rules.edits.change_anything(),
    };
    row.logprobs.is_some() && !likeliest
}

fn sampled_row(found: MergedToken, rank: u32) -> SampledRow {
    let logprobs = found.report.map(|(sum, top)| RowLogprobs {
        logprob: found.raw - sum,
        rank,
        top: top.iter().map(|at: &RankedToken| (at.id, at.value - sum)).collect(),
    });
    SampledRow { token: found.token, logprobs }
}

impl ShardedRows<'_> {
    fn own_candidates(&self, r: usize) -> &[f32] {
        &self.logits.row::<f32>(r)[..self.vocab_shard.ids]
    }

    /// First all-gather: candidates of all ranks, merged.
    fn outcomes(&self, gather: &mut GatherFn<'_>) -> Result<Vec<MergeOutcome>, DeviceError> {
        let shapes: Vec<Option<CandidateLayout>> =
            self.requests.iter().map(|row| CandidateLayout::of(row, self.vocab_shard)).collect();
        let look = |r: usize, scratch: &mut RowScratch| {
            let shape = shapes[r].as_ref()?;
            Some(
                local_candidates(
                    self.own_candidates(r),
                    self.vocab_shard.first_id,
                    &self.requests[r],
                    shape,
                    scratch,
                )
                .words(shape),
            )
        };
        let own = self.sampler.for_each_row(self.threads, self.requests.len(), &look);
        let own: Vec<u32> = own.into_iter().flatten().flatten().collect();
        let all = self.exchange(&own, gather)?;
        let mut from = 0;
        let outcome = |(row, shape): (&SampleRequest<'_>, &Option<CandidateLayout>)| {
            let shape = shape.as_ref()?;
            let to = from + shape.words();
            let of = |words: &[u32]| RankCandidates::of(&words[from..to], shape);
            let ranks: Vec<RankCandidates> = all.chunks_exact(own.len()).map(of).collect();
            from = to;
            merge(row, self.vocab_shard.vocab, &ranks)
        };
        Ok(self.requests.iter().zip(&shapes).map(outcome).collect())
    }

    /// Gathers undecided rows whole and samples them on each rank.
    fn sample_full_rows(
        &self,
        outcomes: &[MergeOutcome],
        gather: &mut GatherFn<'_>,
    ) -> Result<Vec<RowSampleResult>, DeviceError> {
        let open = (0..outcomes.len()).filter(|&r| outcomes[r].is_none());
        let asked: Vec<SampleRequest<'_>> = open.clone().map(|r| self.requests[r]).collect();
        if asked.is_empty() {
            return Ok(Vec::new());
        }
        let own: Vec<f32> = open.flat_map(|r| self.logits.row::<f32>(r)).copied().collect();
        let mut all = vec![0.0_f32; asked.len() * self.vocab_shard.vocab];
        let to = MatMut::of(&mut all, asked.len(), self.vocab_shard.vocab)?;
        if !gather(MatRef::of(&own, asked.len(), self.vocab_shard.cols)?, to) {
            return Err(DeviceError::PeerRanksFailed);
        }
        let logits = MatRef::of(&all, asked.len(), self.vocab_shard.vocab)?;
        Ok(self.sampler.sample_rows(self.threads, logits, &asked))
    }

    /// Last all-gather: ranks among all ids, from 1, of the sampled tokens for which they are requested.
    fn token_ranks(
        &self,
        outcomes: &[MergeOutcome],
        gather: &mut GatherFn<'_>,
    ) -> Result<Vec<u32>, DeviceError> {
        let found = outcomes.iter().enumerate().filter_map(|(r, outcome)| match outcome {
            Some(Ok(found)) if counts(&self.requests[r]) => Some((r, found)),
            _ => None,
        });
        let before = |(r, found): (usize, &MergedToken)| {
            let own = self.own_candidates(r);
            let at =
                (found.token as usize).saturating_sub(self.vocab_shard.first_id).min(own.len());
            vector::count_before(own, found.raw, at) as u32
        };
        let own: Vec<u32> = found.map(before).collect();
        let all = self.exchange(&own, gather)?;
        let place = |r: usize| 1 + all.iter().skip(r).step_by(own.len()).sum::<u32>();
        Ok((0..own.len()).map(place).collect())
    }

    /// Gathers the words of all ranks, concatenated in the order of ranks.
    fn exchange(&self, own: &[u32], gather: &mut GatherFn<'_>) -> Result<Vec<u32>, DeviceError> {
        if own.is_empty() {
            return Ok(Vec::new());
        }
        let own: Vec<i32> = own.iter().map(|&word| word as i32).collect();
        let mut all = vec![0_i32; own.len() * self.vocab_shard.ranks];
        let cols = all.len();
        if !gather(MatRef::of(&own, 1, own.len())?, MatMut::of(&mut all, 1, cols)?) {
            return Err(DeviceError::PeerRanksFailed);
        }
        Ok(all.into_iter().map(|word| word as u32).collect())
    }
}

#[cfg(test)]
mod tests;
