//! What steps compute with, and never change.

use crate::clock::ns;
use crate::draft_passes::Draft;
use crate::expert_reports::ExpertReports;
use collectives::{Group, Operation, Spent};
use models::{Exchange, ExpertLoad, Forward, Model};
use ops::{BatchView, InParts, KvPool, Ops, VocabPart};
use protocol::CollectiveTiming;

/// What a step computes with: the weights, and who shares them.
pub(crate) struct Engine {
    pub(crate) ops: Ops,
    pub(crate) model: Box<dyn Model>,
    /// Who drafts for it, if something of its own does.
    pub(crate) draft: Option<Draft>,
    pub(crate) tp: Group,
    pub(crate) dp: Group,
    /// The ids whose logits this rank makes.
    pub(crate) part: VocabPart,
    /// What routers choose, if this rank counts it.
    pub(crate) reports: Option<ExpertReports>,
}

impl Engine {
    /// Which questions are answered without whole rows of logits. Who has them whole has nobody to ask.
    pub(crate) fn in_parts(&self) -> InParts {
        match self.tp.size() {
            1 => InParts::Everything,
            _ => self.ops.device().samples_in_parts(&self.part),
        }
    }

    /// Whether steps may want whole rows of logits, by what they ask: recorded ones exist for each answer.
    pub(crate) fn whole_rows(&self) -> &'static [bool] {
        match self.in_parts() {
            InParts::Everything => &[false],
            InParts::Nothing => &[true],
            InParts::TopK(_) => &[false, true],
        }
    }

    /// A pass over a batch by one of its models, which is asked for all hidden states and not watched.
    pub(crate) fn pass<'a>(&'a self, kv: &'a KvPool, batch: &'a BatchView) -> Forward<'a> {
        let Self { ops, tp, dp, .. } = self;
        let (dp_rows, exchange) = (0, Exchange::Gather);
        let (asked, taps, load, probe) = (None, None, None, None);
        Forward { ops, tp, dp, dp_rows, exchange, kv, batch, asked, taps, load, probe }
    }

    /// Where routers count, if they do.
    pub(crate) fn load(&self) -> Option<&ExpertLoad> {
        self.reports.as_ref().map(|reports| &reports.load)
    }

    /// What the calls of the step that is over took.
    pub(crate) fn collective_timing(&self) -> CollectiveTiming {
        let mut timing = CollectiveTiming::default();
        for Spent { operation, time } in self.tp.take_spent() {
            match operation {
                Operation::AllReduce => timing.tp_all_reduce_ns = ns(time),
                Operation::AllGather => timing.tp_all_gather_ns = ns(time),
                other => {
                    debug_assert!(false, "{} of a replica has no place in reports", other.name());
                }
            }
        }
        for Spent { operation, time } in self.dp.take_spent() {
            match operation {
                Operation::AllGatherRows => timing.dp_all_gather_rows_ns = ns(time),
                Operation::ExchangeCounts => timing.dp_exchange_counts_ns = ns(time),
                Operation::AllToAll => timing.dp_all_to_all_ns = ns(time),
                Operation::ReduceScatter => timing.dp_reduce_scatter_ns = ns(time),
                other => {
                    debug_assert!(false, "{} of replicas has no place in reports", other.name());
                }
            }
        }
        timing
    }
}
