//! A step that the device works on, until its answers are there.

use crate::ExecutorError;
use crate::clock::ns_since;
use crate::expert_load_report::ExpertLoadReport;
use crate::ngram_proposer::HistoryUpdateSender;
use crate::sampler::{self, LogitsRow};
use crate::trace::StepTrace;
use collectives::LaunchCheckpoint;
use ops::{SamplerOutputMemory, SamplerOutputsInFlight};
use protocol::{Batch, Epoch, RowError, RowOutput, StepId, StepOutput, StepTiming};
use std::sync::mpsc::Sender;
use std::time::Instant;

/// A step that has been submitted.
pub(crate) struct PendingStep {
    step: StepId,
    epoch: Epoch,
    pub(crate) rows: Vec<RowOutput>,
    pub(crate) logits_rows: Vec<LogitsRow>,
    /// Rows whose masks are late.
    pub(crate) overdue_rows: Vec<usize>,
    /// Whom the drafter hears of this step.
    pub(crate) history_sender: Option<HistoryUpdateSender>,
    pub(crate) outputs: Option<SamplerOutputsInFlight>,
    memory_return: Sender<SamplerOutputMemory>,
    /// What the groups have launched up to here.
    pub(crate) launched: Vec<LaunchCheckpoint>,
    pub(crate) timing: StepTiming,
    pub(crate) experts: Option<ExpertLoadReport>,
    started: Instant,
    pub(crate) trace: Option<StepTrace>,
}

impl PendingStep {
    /// Of a batch of this epoch that nothing was done for so far. The memory of its answers goes `home`.
    pub(crate) fn new(
        started: Instant,
        batch: &Batch,
        epoch: Epoch,
        home: Sender<SamplerOutputMemory>,
    ) -> Self {
        Self {
            step: batch.step,
            epoch,
            rows: vec![RowOutput::default(); batch.rows.len()],
            logits_rows: Vec::new(),
            overdue_rows: Vec::new(),
            history_sender: None,
            outputs: None,
            memory_return: home,
            launched: Vec::new(),
            timing: StepTiming::default(),
            experts: None,
            started,
            trace: None,
        }
    }

    /// Waits for the device and forms the answer.
    pub(crate) fn finish(mut self) -> Result<StepOutput, ExecutorError> {
        if let Some(answers) = self.outputs.take() {
            let waiting = Instant::now();
            let answers = answers.wait();
            let waited = Instant::now();
            self.launched.iter().try_for_each(LaunchCheckpoint::finish)?; // It says more than the device does.
            let answers = answers?;
            sampler::write_outputs(&self.logits_rows, &answers, &mut self.rows);
            if let Some(trace) = self.trace.take() {
                trace.finish(waiting, waited); // Before the memory goes home: see `trace::STEP_EVENT_SLOTS`.
            }
            // An executor that is gone needs no memory.
            let _ = self.memory_return.send(answers.into_memory());
        }
        for &row in &self.overdue_rows {
            self.rows[row].error.get_or_insert(RowError::MaskOverdue);
        }
        if let Some(speaker) = &mut self.history_sender {
            speaker.record_outputs(&self.rows);
        }
        let mut timing = self.timing;
        let elapsed = ns_since(self.started);
        timing.forward_ns =
            timing.forward_ns.max(elapsed.saturating_sub(timing.inputs_ns + timing.sample_ns));
        let experts = self.experts.map(ExpertLoadReport::wait).transpose()?.unwrap_or_default();
        let Self { step, epoch, rows, .. } = self;
        Ok(StepOutput { step, epoch, rows, timing, expert_tokens: experts })
    }
}
