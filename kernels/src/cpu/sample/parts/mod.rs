//! Rows of which every rank has a part: the answers of one that has them whole, for a few words of each rank.
//!
//! In one round every rank tells what the rules need ([`shape`]): an id with its value where that decides (the likeliest one;
//! with noise, the noisiest one), its likeliest ids where a rule cuts, and the mass that they are part of. What a cut keeps
//! can lie beyond what was named, in flat rows under top-p or min-p: such rows, and those about which more would have to be
//! told than they have logits, are brought whole. A last round counts the ids before a token whose place is asked for.
//!
//! All ranks compute the same of the same words in the order of ranks, so they agree to the bit. With one that has whole
//! rows they agree in ids; sums are added in another order.

mod bring;
mod brought;
mod merge;
mod shape;

use super::row::{Ranked, Scratch};
use super::rules::{Logprobs, Pick, Picked, RowAnswer, RowRequest, Unusable};
use super::{Sampler, vector};
use crate::cpu::pool::ThreadPool;
use crate::{DeviceError, Gather, Mat, MatMut, VocabPart};
use bring::bring;
use brought::Brought;
use merge::{Found, merge};
use shape::Shape;

/// The rows of a call, as this rank has them.
struct Rows<'a> {
    sampler: &'a Sampler,
    threads: &'a ThreadPool,
    /// f32 `[n, part.cols]`
    logits: Mat<'a>,
    part: &'a VocabPart,
    asked: &'a [RowRequest<'a>],
}

/// What is known of a row; `None` = nothing, it must be brought whole.
type Outcome = Option<Result<Found, Unusable>>;

impl Sampler {
    /// One answer per row of `logits`, f32 `[n, part.cols]`; the same on all ranks.
    pub(crate) fn answer_parts(
        &self,
        threads: &ThreadPool,
        (logits, part): (Mat<'_>, &VocabPart),
        asked: &[RowRequest<'_>],
        gather: &mut Gather<'_>,
    ) -> Result<Vec<RowAnswer>, DeviceError> {
        let rows = Rows { sampler: self, threads, logits, part, asked };
        let outcomes = rows.outcomes(gather)?;
        let mut whole = rows.answer_whole(&outcomes, gather)?.into_iter();
        let mut places = rows.places(&outcomes, gather)?.into_iter();
        let answer = |(outcome, row): (Outcome, &RowRequest<'_>)| match outcome {
            None => whole.next().expect("one for each row without an outcome"),
            Some(Err(unusable)) => Err(unusable),
            Some(Ok(found)) if counts(row) => {
                Ok(picked(found, places.next().expect("one for each row that counts")))
            }
            Some(Ok(found)) => Ok(picked(found, 1)),
        };
        Ok(outcomes.into_iter().zip(asked).map(answer).collect())
    }
}

/// Whether ids before the token must be counted: there are none before the likeliest one.
fn counts(row: &RowRequest<'_>) -> bool {
    let likeliest = match &row.pick {
        Pick::Known(_) => false,
        Pick::Choose(rules) => rules.draw.is_none() && !rules.edits.change_anything(),
    };
    row.logprobs.is_some() && !likeliest
}

fn picked(found: Found, rank: u32) -> Picked {
    let logprobs = found.report.map(|(sum, top)| Logprobs {
        logprob: found.raw - sum,
        rank,
        top: top.iter().map(|at: &Ranked| (at.id, at.value - sum)).collect(),
    });
    Picked { token: found.token, logprobs }
}

impl Rows<'_> {
    fn own(&self, r: usize) -> &[f32] {
        &self.logits.row::<f32>(r)[..self.part.ids]
    }

    /// The first round: what the rules need.
    fn outcomes(&self, gather: &mut Gather<'_>) -> Result<Vec<Outcome>, DeviceError> {
        let shapes: Vec<Option<Shape>> =
            self.asked.iter().map(|row| Shape::of(row, self.part)).collect();
        let look = |r: usize, scratch: &mut Scratch| {
            let shape = shapes[r].as_ref()?;
            Some(bring(self.own(r), self.part.first, &self.asked[r], shape, scratch).words(shape))
        };
        let own = self.sampler.each(self.threads, self.asked.len(), &look);
        let own: Vec<u32> = own.into_iter().flatten().flatten().collect();
        let all = self.exchange(&own, gather)?;
        let mut from = 0;
        let outcome = |(row, shape): (&RowRequest<'_>, &Option<Shape>)| {
            let shape = shape.as_ref()?;
            let to = from + shape.words();
            let of = |words: &[u32]| Brought::of(&words[from..to], shape);
            let ranks: Vec<Brought> = all.chunks_exact(own.len()).map(of).collect();
            from = to;
            merge(row, self.part.vocab, &ranks)
        };
        Ok(self.asked.iter().zip(&shapes).map(outcome).collect())
    }

    /// Rows that words did not decide: each rank gets them whole and answers them.
    fn answer_whole(
        &self,
        outcomes: &[Outcome],
        gather: &mut Gather<'_>,
    ) -> Result<Vec<RowAnswer>, DeviceError> {
        let open = (0..outcomes.len()).filter(|&r| outcomes[r].is_none());
        let asked: Vec<RowRequest<'_>> = open.clone().map(|r| self.asked[r]).collect();
        if asked.is_empty() {
            return Ok(Vec::new());
        }
        let own: Vec<f32> = open.flat_map(|r| self.logits.row::<f32>(r)).copied().collect();
        let mut all = vec![0.0_f32; asked.len() * self.part.vocab];
        let to = MatMut::of(&mut all, asked.len(), self.part.vocab)?;
        if !gather(Mat::of(&own, asked.len(), self.part.cols)?, to) {
            return Err(DeviceError::Peers);
        }
        let logits = Mat::of(&all, asked.len(), self.part.vocab)?;
        Ok(self.sampler.answer(self.threads, logits, &asked))
    }

    /// The last round: places, from 1, of the tokens that have been found where they are asked for.
    fn places(
        &self,
        outcomes: &[Outcome],
        gather: &mut Gather<'_>,
    ) -> Result<Vec<u32>, DeviceError> {
        let found = outcomes.iter().enumerate().filter_map(|(r, outcome)| match outcome {
            Some(Ok(found)) if counts(&self.asked[r]) => Some((r, found)),
            _ => None,
        });
        let before = |(r, found): (usize, &Found)| {
            let own = self.own(r);
            let at = (found.token as usize).saturating_sub(self.part.first).min(own.len());
            vector::count_before(own, found.raw, at) as u32
        };
        let own: Vec<u32> = found.map(before).collect();
        let all = self.exchange(&own, gather)?;
        let place = |r: usize| 1 + all.iter().skip(r).step_by(own.len()).sum::<u32>();
        Ok((0..own.len()).map(place).collect())
    }

    /// The words of all ranks, one rank behind the other.
    fn exchange(&self, own: &[u32], gather: &mut Gather<'_>) -> Result<Vec<u32>, DeviceError> {
        if own.is_empty() {
            return Ok(Vec::new());
        }
        let own: Vec<i32> = own.iter().map(|&word| word as i32).collect();
        let mut all = vec![0_i32; own.len() * self.part.ranks];
        let cols = all.len();
        if !gather(Mat::of(&own, 1, own.len())?, MatMut::of(&mut all, 1, cols)?) {
            return Err(DeviceError::Peers);
        }
        Ok(all.into_iter().map(|word| word as u32).collect())
    }
}

#[cfg(test)]
mod tests;
