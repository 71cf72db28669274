//! A step in flight: the copy of its sampled tokens to the host, and their conversion to the step output.

use super::context::StepContext;
use super::logits_rows::{self, LogitsRow};
use super::pooling::PooledSlice;
use super::{STEPS_IN_FLIGHT, StepState};
use crate::ExecutorError;
use crate::clock::ns_since;
use crate::expert_load_report::PendingExpertLoadReport;
use crate::spec_decode::EmittedTokenSender;
use crate::trace::StepTrace;
use collectives::LaunchedCollectives;
use ops::{Ops, SamplerOutputHostBuffers, SamplerOutputsInFlight, StepBuffers};
use protocol::{Batch, Epoch, RowError, RowOutput, StepId, StepOutput, StepTiming};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// A step that has been launched and whose output has not been read yet.
pub(crate) struct PendingStep {
    step: StepId,
    epoch: Epoch,
    pub(crate) rows: Vec<RowOutput>,
    pub(crate) logits_rows: Vec<LogitsRow>,
    /// Indices of the rows whose grammar bitmasks were overdue, so that they sampled no token.
    pub(crate) overdue_rows: Vec<usize>,
    /// Sends the emitted tokens of the step to the proposer; `None` = the proposer does not read emitted
    /// tokens.
    pub(crate) emitted_tokens: Option<EmittedTokenSender>,
    pub(crate) outputs: Option<SamplerOutputsInFlight>,
    memory_return: Sender<SamplerOutputHostBuffers>,
    /// Pooled hidden states that are being copied to the host.
    pub(crate) pooled: Vec<PooledSlice>,
    /// Most recent collective that each communication group has launched up to this step. `finish` checks
    /// that these collectives have completed.
    pub(crate) launched: Vec<LaunchedCollectives>,
    pub(crate) timing: StepTiming,
    pub(crate) experts: Option<PendingExpertLoadReport>,
    pub(crate) started: Instant,
    pub(crate) trace: Option<StepTrace>,
}

/// Pool of host memory for step outputs, with enough memory for `STEPS_IN_FLIGHT` + 1 steps.
pub(super) struct OutputMemoryPool {
    sender: Sender<SamplerOutputHostBuffers>,
    receiver: Receiver<SamplerOutputHostBuffers>,
}

impl OutputMemoryPool {
    pub(super) fn new(ops: &Ops, buffers: &StepBuffers) -> Result<Self, ExecutorError> {
        let (sender, receiver) = channel();
        for _ in 0..=STEPS_IN_FLIGHT {
            let _ = sender.send(buffers.output_memory(ops)?); // The receiver is in the same struct.
        }
        Ok(Self { sender, receiver })
    }

    /// Returns a sender by which a finished step returns its output memory to the pool.
    pub(super) fn sender(&self) -> Sender<SamplerOutputHostBuffers> {
        self.sender.clone()
    }

    /// Takes memory from the pool; blocks until memory is available.
    #[expect(
        clippy::disallowed_methods,
        reason = "the pool gets its memory back from the steps in flight, which have a deadline"
    )]
    pub(super) fn take(&self) -> SamplerOutputHostBuffers {
        self.receiver.recv().expect("the sender is in the same struct")
    }

    pub(super) fn release(&self, memory: SamplerOutputHostBuffers) {
        let _ = self.sender.send(memory); // The receiver is in the same struct.
    }
}

impl StepState {
    /// Starts the copy of the last slice of sampled tokens to the host, and completes the pending step.
    pub(super) fn start_output_copy(
        &mut self,
        context: StepContext<'_>,
    ) -> Result<PendingStep, ExecutorError> {
        let StepContext { model, logits_rows, last_slice, graph, slices, mut pending, .. } =
            context;
        let last = &logits_rows[last_slice];
        let with_top_logprobs = logits_rows::needs_top_logprobs(last);
        let (ops, memory) = (&model.ops, self.output_memory.take());
        pending.outputs =
            Some(self.device.buffers.download(ops, memory, last.len(), with_top_logprobs)?);
        pending.logits_rows.extend_from_slice(last);
        if let Some(trace) = &mut pending.trace {
            trace.submitted(*ops.stream(), slices)?;
        }
        self.logits_rows = logits_rows;
        if let Some(reporter) = &model.expert_load_reporter {
            pending.experts = reporter.begin(ops, graph.is_some())?;
        }
        pending.timing.collectives = model.collective_timing();
        pending.launched =
            [&model.tp, &model.dp].iter().filter_map(|g| g.launch_checkpoint()).collect();
        Ok(pending)
    }
}

impl PendingStep {
    /// Creates the pending step of `batch`, with the current time as its start time. The memory of its
    /// outputs is returned through `memory_return`.
    pub(crate) fn new(
        batch: &Batch,
        epoch: Epoch,
        memory_return: Sender<SamplerOutputHostBuffers>,
    ) -> Self {
        Self {
            step: batch.step,
            epoch,
            rows: vec![RowOutput::default(); batch.rows.len()],
            logits_rows: Vec::new(),
            overdue_rows: Vec::new(),
            emitted_tokens: None,
            outputs: None,
            memory_return,
            pooled: Vec::new(),
            launched: Vec::new(),
            timing: StepTiming::default(),
            experts: None,
            started: Instant::now(),
            trace: None,
        }
    }

    /// Waits for the device and returns the output of the step.
    pub(crate) fn finish(mut self) -> Result<StepOutput, ExecutorError> {
        self.wait_for_sampled_tokens()?;
        for slice in std::mem::take(&mut self.pooled) {
            slice.finish(&mut self.rows)?;
        }
        for &row in &self.overdue_rows {
            self.rows[row].drafted = 0;
            self.rows[row].error.get_or_insert(RowError::MaskOverdue);
        }
        if let Some(emitted_tokens) = &mut self.emitted_tokens {
            emitted_tokens.record_outputs(&self.rows);
        }
        let mut timing = self.timing;
        let elapsed = ns_since(self.started);
        timing.forward_ns =
            timing.forward_ns.max(elapsed.saturating_sub(timing.inputs_ns + timing.sample_ns));
        let experts =
            self.experts.map(PendingExpertLoadReport::wait).transpose()?.unwrap_or_default();
        let Self { step, epoch, rows, .. } = self;
        Ok(StepOutput { step, epoch, rows, timing, expert_tokens: experts })
    }

    /// Waits for the copy of the sampled tokens, if the step has one, and writes the tokens to the outputs of
    /// the batch rows.
    fn wait_for_sampled_tokens(&mut self) -> Result<(), ExecutorError> {
        let Some(outputs) = self.outputs.take() else { return Ok(()) };
        let wait_start = Instant::now();
        let outputs = outputs.wait();
        let wait_end = Instant::now();
        self.launched.iter().try_for_each(LaunchedCollectives::finish)?; // More specific than the device's error.
        let outputs = outputs?;
        logits_rows::write_outputs(&self.logits_rows, &outputs, &mut self.rows);
        if let Some(trace) = self.trace.take() {
            trace.finish(wait_start, wait_end); // Before the memory is returned: see `trace::STEP_EVENT_SLOTS`.
        }
        // The send fails if the executor was dropped; the memory is then not needed.
        let _ = self.memory_return.send(outputs.into_memory());
        Ok(())
    }
}
