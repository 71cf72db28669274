//! A step that the device works on, until its answers are there.

use crate::ExecutorError;
use crate::clock::ns_since;
use crate::drafter::Speaker;
use crate::expert_reports::ExpertReport;
use crate::sampler::{self, Question};
use crate::trace::StepTrace;
use collectives::Launched;
use ops::{AnswerMemory, AnswersInFlight};
use protocol::{Batch, Epoch, RowError, RowOutput, StepId, StepOutput, StepTiming};
use std::sync::mpsc::Sender;
use std::time::Instant;

/// A step that has been submitted.
pub(crate) struct Pending {
    step: StepId,
    epoch: Epoch,
    pub(crate) rows: Vec<RowOutput>,
    pub(crate) questions: Vec<Question>,
    /// Rows whose masks are late.
    pub(crate) late: Vec<usize>,
    /// Whom the drafter hears of this step.
    pub(crate) speaker: Option<Speaker>,
    pub(crate) answers: Option<AnswersInFlight>,
    home: Sender<AnswerMemory>,
    /// What the groups have launched up to here.
    pub(crate) launched: Vec<Launched>,
    pub(crate) timing: StepTiming,
    pub(crate) experts: Option<ExpertReport>,
    started: Instant,
    pub(crate) trace: Option<StepTrace>,
}

impl Pending {
    /// Of a batch of this epoch that nothing was done for so far. The memory of its answers goes `home`.
    pub(crate) fn begun(
        started: Instant,
        batch: &Batch,
        epoch: Epoch,
        home: Sender<AnswerMemory>,
    ) -> Self {
        Self {
            step: batch.step,
            epoch,
            rows: vec![RowOutput::default(); batch.rows.len()],
            questions: Vec::new(),
            late: Vec::new(),
            speaker: None,
            answers: None,
            home,
            launched: Vec::new(),
            timing: StepTiming::default(),
            experts: None,
            started,
            trace: None,
        }
    }

    /// Waits for the device and forms the answer.
    pub(crate) fn finish(mut self) -> Result<StepOutput, ExecutorError> {
        if let Some(answers) = self.answers.take() {
            let waiting = Instant::now();
            let answers = answers.wait();
            let waited = Instant::now();
            self.launched.iter().try_for_each(Launched::finish)?; // It says more than the device does.
            let answers = answers?;
            sampler::enter(&self.questions, &answers, &mut self.rows);
            if let Some(trace) = self.trace.take() {
                trace.finish(waiting, waited); // Before the memory goes home: see `trace::PLACES`.
            }
            // An executor that is gone needs no memory.
            let _ = self.home.send(answers.into_memory());
        }
        for &row in &self.late {
            self.rows[row].error.get_or_insert(RowError::MaskLate);
        }
        if let Some(speaker) = &mut self.speaker {
            speaker.note(&self.rows);
        }
        let mut timing = self.timing;
        let elapsed = ns_since(self.started);
        timing.forward_ns =
            timing.forward_ns.max(elapsed.saturating_sub(timing.inputs_ns + timing.sample_ns));
        let experts = self.experts.map(ExpertReport::wait).transpose()?.unwrap_or_default();
        let Self { step, epoch, rows, .. } = self;
        Ok(StepOutput { step, epoch, rows, timing, experts })
    }
}
