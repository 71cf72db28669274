//! Models and communication groups of a rank. Steps read but never change them.

use crate::ExecutorError;
use crate::clock::ns;
use crate::expert_load_report::ExpertLoadReporter;
use crate::spec_decode::ProposerModel;
use collectives::{CollectiveHostTime, CollectiveOp, ParallelGroup};
use models::{ExpertExchangeMethod, ExpertLoadStats, ForwardContext, Model};
use ops::{
    AllGatherFn, DeviceBatchMetadata, KvPool, MatMut, MatRef, Ops, VocabParallelSupport, VocabShard,
};
use protocol::CollectiveTiming;
use std::sync::Arc;

/// Models and communication groups that every step uses.
pub(crate) struct ModelContext {
    pub(crate) ops: Ops,
    pub(crate) model: Box<dyn Model>,
    /// Weights of the classification head, f32 `[hidden size]`, if the model has one.
    pub(crate) score: Option<Arc<[f32]>>,
    /// Model of the proposer (speculative decoding), if it runs on the device.
    pub(crate) proposer: Option<ProposerModel>,
    pub(crate) tp: ParallelGroup,
    pub(crate) dp: ParallelGroup,
    /// Vocabulary shard whose logits this rank computes.
    pub(crate) vocab_shard: VocabShard,
    /// Reports the number of tokens routed to each expert; `None` = the model has no experts, or another rank
    /// of the replica counts the tokens.
    pub(crate) expert_load_reporter: Option<ExpertLoadReporter>,
}

impl ModelContext {
    /// Returns which sampling parameters the device supports if each rank has only its vocabulary shard of
    /// the logits (vocab-parallel sampling). A single rank has full rows of logits, so it supports all
    /// parameters.
    pub(crate) fn vocab_parallel_support(&self) -> VocabParallelSupport {
        match self.tp.size() {
            1 => VocabParallelSupport::AllRules,
            _ => self.ops.device().vocab_parallel_support(&self.vocab_shard),
        }
    }

    /// Values of `full_logits` (whether the ranks all-gather full rows of logits before sampling) that steps
    /// of this rank may use. Graphs are captured for each value.
    pub(crate) fn full_logits_variants(&self) -> &'static [bool] {
        match self.vocab_parallel_support() {
            VocabParallelSupport::AllRules => &[false],
            VocabParallelSupport::Unsupported => &[true],
            VocabParallelSupport::TopK(_) => &[false, true],
        }
    }

    /// Returns the context of a forward pass over `batch`. With this context, the pass returns only the
    /// hidden states of all tokens: no auxiliary hidden states, expert token counts or intermediate results.
    pub(crate) fn forward_context<'a>(
        &'a self,
        kv: &'a KvPool,
        batch: &'a DeviceBatchMetadata,
    ) -> ForwardContext<'a> {
        let Self { ops, tp, dp, .. } = self;
        let (dp_rows, expert_exchange) = (0, ExpertExchangeMethod::AllGather);
        let (logits_indices, aux_hidden_states, expert_load, probe) = (None, None, None, None);
        ForwardContext {
            ops,
            tp,
            dp,
            dp_rows,
            expert_exchange,
            kv,
            batch,
            logits_indices,
            aux_hidden_states,
            expert_load,
            output_memory: None,
            probe,
        }
    }

    /// Calls `launch` with a function that all-gathers over the TP group. If an all-gather failed, returns
    /// its error instead of the error of `launch`, because it is more specific.
    pub(crate) fn with_all_gather<E>(
        &self,
        launch: impl FnOnce(&mut AllGatherFn<'_>) -> Result<(), E>,
    ) -> Result<(), ExecutorError>
    where
        ExecutorError: From<E>,
    {
        let mut gathered = Ok(());
        let launched = launch(&mut |local: MatRef<'_>, all: MatMut<'_>| {
            gathered = self.tp.all_gather(self.ops.stream(), local, all);
            gathered.is_ok()
        });
        gathered?;
        Ok(launched?)
    }

    /// Counters of the tokens routed to each expert, if this rank counts them for its replica.
    pub(crate) fn expert_load(&self) -> Option<&ExpertLoadStats> {
        self.expert_load_reporter.as_ref().map(|reporter| &reporter.load)
    }

    /// Returns the time spent in each kind of collective since the previous call. Called once per step.
    pub(crate) fn collective_timing(&self) -> CollectiveTiming {
        let mut timing = CollectiveTiming::default();
        for CollectiveHostTime { op: operation, time } in self.tp.take_times() {
            match operation {
                CollectiveOp::AllReduce => timing.tp_all_reduce_ns = ns(time),
                CollectiveOp::AllGather => timing.tp_all_gather_ns = ns(time),
                other => {
                    debug_assert!(false, "{} in a TP group is not reported", other.name());
                }
            }
        }
        for CollectiveHostTime { op: operation, time } in self.dp.take_times() {
            match operation {
                CollectiveOp::AllGatherRows => timing.dp_all_gather_rows_ns = ns(time),
                CollectiveOp::ExchangeCounts => timing.dp_exchange_counts_ns = ns(time),
                CollectiveOp::AllToAll => timing.dp_all_to_all_ns = ns(time),
                CollectiveOp::ReduceScatter => timing.dp_reduce_scatter_ns = ns(time),
                other => {
                    debug_assert!(false, "{} in a DP group is not reported", other.name());
                }
            }
        }
        timing
    }
}
