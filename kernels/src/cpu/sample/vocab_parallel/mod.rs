//! Vocab-parallel sampling: every rank has the logits of a vocabulary shard. The sampled tokens equal those
//! sampled from whole rows, but the ranks exchange only a few words per row.
//!
//! In one all-gather every rank sends candidate tokens with their values ([`CandidateLayout`]). Greedy rows
//! need the most likely token of each shard; unfiltered random rows the token with the largest noisy logit;
//! filtered rows the most likely tokens of each shard, and for top-p the probability mass of the shard. In
//! flat distributions top-p or min-p can keep tokens that are not among these candidates: such rows, and rows
//! with more words to exchange than logits, are gathered whole. If the rank of a token among all token ids is
//! requested, a last all-gather counts the tokens before it in the token order (larger logit, or equal logit
//! and lower id).
//!
//! All ranks compute from the same words in the order of ranks, so their results are bit-identical. Token ids
//! equal those sampled from whole rows; sums of log-probabilities differ in the order of summation.

mod candidate_layout;
mod local_candidates;
mod merge;
mod rank_candidates;

use candidate_layout::CandidateLayout;
use device::{DeviceError, MatMut, MatRef, ThreadPool};
use local_candidates::local_candidates;
use merge::{MergedLogprobs, MergedToken, merge};
use rank_candidates::RankCandidates;

use super::row::RowScratch;
use super::rules::{
    RowLogprobs, RowSampleResult, SampleError, SampleOrScore, SampleRequest, SampledRow,
};
use super::{CpuSampler, vector};
use crate::{AllGatherFn, VocabShard};

/// Logits rows of one sampling op, of which this rank has a vocabulary shard, and their sampling requests.
struct ShardedLogitsRows<'a> {
    sampler: &'a CpuSampler,
    threads: &'a ThreadPool,
    /// Logits of this shard; f32 `[rows, shard.cols]`.
    logits: MatRef<'a>,
    shard: &'a VocabShard,
    requests: &'a [SampleRequest<'a>],
}

/// Merged result of a row; `None` = the candidates do not determine it, so the whole row must be gathered.
type MergeOutcome = Option<Result<MergedToken, SampleError>>;

impl CpuSampler {
    /// Samples one token per row of `logits`, f32 `[rows, shard.cols]`; the result is equal on all ranks.
    pub(crate) fn sample_vocab_parallel(
        &self,
        threads: &ThreadPool,
        logits: MatRef<'_>,
        shard: &VocabShard,
        requests: &[SampleRequest<'_>],
        gather: &mut AllGatherFn<'_>,
    ) -> Result<Vec<RowSampleResult>, DeviceError> {
        let rows = ShardedLogitsRows { sampler: self, threads, logits, shard, requests };
        let outcomes = rows.outcomes(gather)?;
        let mut full_rows = rows.sample_full_rows(&outcomes, gather)?.into_iter();
        let mut token_ranks = rows.token_ranks(&outcomes, gather)?.into_iter();
        let result = |(outcome, request): (MergeOutcome, &SampleRequest<'_>)| match outcome {
            None => full_rows.next().expect("one result for each undecided row"),
            Some(Err(error)) => Err(error),
            Some(Ok(token)) if needs_rank_count(request) => {
                let rank = token_ranks.next().expect("one rank for each row that needs a count");
                Ok(sampled_row(token, rank))
            }
            Some(Ok(token)) => Ok(sampled_row(token, 1)),
        };
        Ok(outcomes.into_iter().zip(requests).map(result).collect())
    }
}

/// Whether the rank of the token must be determined by counting the tokens before it in the token order. A
/// greedily sampled token without logit edits is the most likely token and has rank 1.
fn needs_rank_count(request: &SampleRequest<'_>) -> bool {
    let is_top_token = match &request.choice {
        SampleOrScore::Score(_) => false,
        SampleOrScore::Sample(rules) => rules.draw.is_none() && !rules.edits.change_anything(),
    };
    request.logprobs.is_some() && !is_top_token
}

fn sampled_row(token: MergedToken, rank: u32) -> SampledRow {
    let logprobs = token.logprobs.map(|MergedLogprobs { log_sum, top }| RowLogprobs {
        logprob: token.raw - log_sum,
        rank,
        top: top.iter().map(|top| (top.id, top.value - log_sum)).collect(),
    });
    SampledRow { token: token.token, logprobs }
}

impl ShardedLogitsRows<'_> {
    /// Logits of row `r` in the shard of this rank, without padding columns.
    fn shard_logits(&self, r: usize) -> &[f32] {
        &self.logits.row::<f32>(r)[..self.shard.ids]
    }

    /// First all-gather: exchanges the candidates of all ranks and merges them.
    fn outcomes(&self, gather: &mut AllGatherFn<'_>) -> Result<Vec<MergeOutcome>, DeviceError> {
        let layouts: Vec<Option<CandidateLayout>> =
            self.requests.iter().map(|row| CandidateLayout::of(row, self.shard)).collect();
        let words_of_row = |r: usize, scratch: &mut RowScratch| {
            let (layout, request) = (layouts[r].as_ref()?, &self.requests[r]);
            let (logits, first_id) = (self.shard_logits(r), self.shard.first_id);
            Some(local_candidates(logits, first_id, request, layout, scratch).words(layout))
        };
        let local = self.sampler.for_each_row(self.threads, self.requests.len(), words_of_row);
        let local: Vec<u32> = local.into_iter().flatten().flatten().collect();
        let all = self.exchange(&local, gather)?;
        let mut from = 0;
        let outcome = |(request, layout): (&SampleRequest<'_>, &Option<CandidateLayout>)| {
            let layout = layout.as_ref()?;
            let to = from + layout.words();
            let of_rank = |words: &[u32]| RankCandidates::of(&words[from..to], layout);
            let ranks: Vec<RankCandidates> = all.chunks_exact(local.len()).map(of_rank).collect();
            from = to;
            merge(request, self.shard.vocab, &ranks)
        };
        Ok(self.requests.iter().zip(&layouts).map(outcome).collect())
    }

    /// Gathers the rows that the candidates do not determine, and samples them on each rank.
    fn sample_full_rows(
        &self,
        outcomes: &[MergeOutcome],
        gather: &mut AllGatherFn<'_>,
    ) -> Result<Vec<RowSampleResult>, DeviceError> {
        let undecided = (0..outcomes.len()).filter(|&r| outcomes[r].is_none());
        let requests: Vec<SampleRequest<'_>> =
            undecided.clone().map(|r| self.requests[r]).collect();
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let local: Vec<f32> = undecided.flat_map(|r| self.logits.row::<f32>(r)).copied().collect();
        let mut all = vec![0.0_f32; requests.len() * self.shard.vocab];
        let to = MatMut::of(&mut all, requests.len(), self.shard.vocab)?;
        if !gather(MatRef::of(&local, requests.len(), self.shard.cols)?, to) {
            return Err(DeviceError::PeerRanksFailed);
        }
        let logits = MatRef::of(&all, requests.len(), self.shard.vocab)?;
        Ok(self.sampler.sample_rows(self.threads, logits, &requests))
    }

    /// Last all-gather: returns the rank among all token ids, from 1, of each token whose rank is requested
    /// and must be counted.
    fn token_ranks(
        &self,
        outcomes: &[MergeOutcome],
        gather: &mut AllGatherFn<'_>,
    ) -> Result<Vec<u32>, DeviceError> {
        let tokens = outcomes.iter().enumerate().filter_map(|(r, outcome)| match outcome {
            Some(Ok(token)) if needs_rank_count(&self.requests[r]) => Some((r, token)),
            _ => None,
        });
        let local_count = |(r, token): (usize, &MergedToken)| {
            let logits = self.shard_logits(r);
            let index = (token.token as usize).saturating_sub(self.shard.first_id);
            vector::count_before(logits, token.raw, index.min(logits.len())) as u32
        };
        let local: Vec<u32> = tokens.map(local_count).collect();
        let all = self.exchange(&local, gather)?;
        let rank = |r: usize| 1 + all.iter().skip(r).step_by(local.len()).sum::<u32>();
        Ok((0..local.len()).map(rank).collect())
    }

    /// All-gathers 32-bit words: sends `local` and returns the words of all ranks, concatenated in the order
    /// of ranks.
    fn exchange(
        &self,
        local: &[u32],
        gather: &mut AllGatherFn<'_>,
    ) -> Result<Vec<u32>, DeviceError> {
        if local.is_empty() {
            return Ok(Vec::new());
        }
        let local: Vec<i32> = local.iter().map(|&word| word as i32).collect();
        let mut all = vec![0_i32; local.len() * self.shard.ranks];
        let cols = all.len();
        if !gather(MatRef::of(&local, 1, local.len())?, MatMut::of(&mut all, 1, cols)?) {
            return Err(DeviceError::PeerRanksFailed);
        }
        Ok(all.into_iter().map(|word| word as u32).collect())
    }
}

#[cfg(test)]
mod tests;
