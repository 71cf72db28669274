//! What steps compute with, and never change.

use crate::clock::ns;
use crate::expert_load_report::ExpertLoadReporter;
use crate::spec_decode::DraftModel;
use collectives::{CollectiveOp, CollectiveTime, ParallelGroup};
use models::{ExpertExchange, ExpertLoad, ForwardContext, Model, MtpModel};
use ops::{BatchView, KvPool, Ops, VocabParallelSupport, VocabShard};
use protocol::CollectiveTiming;

/// What a step computes with: the weights, and who shares them.
pub(crate) struct ModelContext {
    pub(crate) ops: Ops,
    pub(crate) model: Box<dyn Model>,
    /// Its MTP module, if it drafts with one.
    pub(crate) mtp: Option<Box<dyn MtpModel>>,
    /// Who drafts for it, if something of its own does.
    pub(crate) draft: Option<DraftModel>,
    pub(crate) tp: ParallelGroup,
    pub(crate) dp: ParallelGroup,
    /// The ids whose logits this rank makes.
    pub(crate) vocab_shard: VocabShard,
    /// What routers choose, if this rank counts it.
    pub(crate) expert_load_reporter: Option<ExpertLoadReporter>,
}

impl ModelContext {
    /// Which questions are answered without whole rows of logits. Who has them whole has nobody to ask.
    pub(crate) fn vocab_parallel_support(&self) -> VocabParallelSupport {
        match self.tp.size() {
            1 => VocabParallelSupport::AllRules,
            _ => self.ops.device().vocab_parallel_support(&self.vocab_shard),
        }
    }

    /// Whether steps may want whole rows of logits, by what they ask: recorded ones exist for each answer.
    pub(crate) fn full_logits_variants(&self) -> &'static [bool] {
        match self.vocab_parallel_support() {
            VocabParallelSupport::AllRules => &[false],
            VocabParallelSupport::Unsupported => &[true],
            VocabParallelSupport::TopK(_) => &[false, true],
        }
    }

    /// A pass over a batch by one of its models, which is asked for all hidden states and not watched.
    pub(crate) fn forward_context<'a>(
        &'a self,
        kv: &'a KvPool,
        batch: &'a BatchView,
    ) -> ForwardContext<'a> {
        let Self { ops, tp, dp, .. } = self;
        let (dp_rows, exchange) = (0, ExpertExchange::AllGather);
        let (asked, taps, load, probe) = (None, None, None, None);
        ForwardContext {
            ops,
            tp,
            dp,
            dp_rows,
            expert_exchange: exchange,
            kv,
            batch,
            logits_indices: asked,
            aux_hidden_states: taps,
            expert_load: load,
            probe,
        }
    }

    /// Where routers count, if they do.
    pub(crate) fn expert_load(&self) -> Option<&ExpertLoad> {
        self.expert_load_reporter.as_ref().map(|reports| &reports.load)
    }

    /// What the calls of the step that is over took.
    pub(crate) fn collective_timing(&self) -> CollectiveTiming {
        let mut timing = CollectiveTiming::default();
        for CollectiveTime { op: operation, time } in self.tp.take_times() {
            match operation {
                CollectiveOp::AllReduce => timing.tp_all_reduce_ns = ns(time),
                CollectiveOp::AllGather => timing.tp_all_gather_ns = ns(time),
                other => {
                    debug_assert!(false, "{} of a replica has no place in reports", other.name());
                }
            }
        }
        for CollectiveTime { op: operation, time } in self.dp.take_times() {
            match operation {
                CollectiveOp::AllGatherRows => timing.dp_all_gather_rows_ns = ns(time),
                CollectiveOp::ExchangeCounts => timing.dp_exchange_counts_ns = ns(time),
                CollectiveOp::AllToAll => timing.dp_all_to_all_ns = ns(time),
                CollectiveOp::ReduceScatter => timing.dp_reduce_scatter_ns = ns(time),
                other => {
                    debug_assert!(false, "{} of replicas has no place in reports", other.name());
                }
            }
        }
        timing
    }
}
