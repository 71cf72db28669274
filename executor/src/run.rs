//! Runs an executor on a link to the scheduler: first the start-up phases in the order of the protocol, then
//! a reply to every batch.
//!
//! Any failure, including a panic, is reported as one `Fault` message and ends the executor; the engine
//! starts a new executor. A closed link is a shutdown, not a failure.

use crate::command_inbox::CommandInbox;
use crate::link_exchange::LinkExchange;
use crate::{
    Executor, ExecutorConfig, ExecutorError, StartupPhaseProgress, SubmittedStep, TraceHandle,
    ranks,
};
use protocol::link::{LinkError, MessageLink, MessageReceiver, MessageSender};
use protocol::{
    DeviceKind, ExecutorCommand, ExecutorEvent, ExecutorHello, PROTOCOL_VERSION, ProfilerStatus,
    StartupPhase, StepId, StepOutput,
};
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// Minimum interval between progress reports, so that a slow receiver does not slow down the loading of
/// weights.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of messages and steps in the queue of the reply thread. It exceeds the number of steps that
/// a scheduler has in flight.
const OUTBOX_CAPACITY: usize = 8;

/// Epoch of the first executors that the engine starts; executors that replace failed executors have a later
/// epoch.
const FIRST_EPOCH: u64 = 1;

/// Runs an executor on this thread until `Shutdown` arrives, the peer closes the link, or the executor fails.
///
/// Batches are submitted on this thread and finished on a reply thread, so that the next step is launched
/// while the reply thread waits for the current one.
#[expect(clippy::disallowed_methods, reason = "the thread ends with its queue or its link")]
pub fn run<L>(config: ExecutorConfig, link: L)
where
    L: MessageLink<SentMessage = ExecutorEvent, ReceivedMessage = ExecutorCommand>,
{
    let (sender, mut receiver) = link.split();
    let (outbox, outbox_receiver) = sync_channel(OUTBOX_CAPACITY);
    let reports_outputs = ranks::reports_outputs(&config.settings);
    let Ok(reply_thread) = thread::Builder::new()
        .name("replies".to_owned())
        .spawn(move || run_reply_thread(sender, &outbox_receiver, reports_outputs))
    else {
        tracing::error!("cannot start the reply thread"); // The link closes, which the peer detects.
        return;
    };
    let step = Cell::new(None);
    let result = catch(|| serve(config, &mut receiver, &outbox, &step));
    if let Err(ExecutorExitReason::Failed(text)) = result {
        report_fault(&outbox, step.get(), text);
    }
    drop(outbox);
    // The reply thread ends after the last message, or when the peer has closed the link. A panic of the
    // reply thread has already been reported as a fault.
    let _ = reply_thread.join();
}

/// An entry in the queue of the reply thread. Entries are processed in order.
#[allow(clippy::large_enum_variant, reason = "few messages exist at a time")]
pub(crate) enum OutboxMessage {
    Message(ExecutorEvent),
    Step(StepId, SubmittedStep),
    /// Trace in which the steps after this entry are recorded (`None` = no trace), and whether to send a
    /// `ProfilerStatus` reply.
    Trace(Option<TraceHandle>, bool),
}

/// Reason why the executor stopped serving.
enum ExecutorExitReason {
    Closed,
    Failed(String),
}

impl<E: Into<ExecutorError>> From<E> for ExecutorExitReason {
    fn from(error: E) -> Self {
        match error.into() {
            ExecutorError::Link(LinkError::Closed) => Self::Closed,
            error => Self::Failed(error.to_string()),
        }
    }
}

/// Converts a panic of `work` into `ExecutorExitReason::Failed`.
fn catch(work: impl FnOnce() -> Result<(), ExecutorExitReason>) -> Result<(), ExecutorExitReason> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        Err(ExecutorExitReason::Failed(format!("panic: {}", panic_text(panic.as_ref()))))
    })
}

fn report_fault(outbox: &SyncSender<OutboxMessage>, step: Option<StepId>, text: String) {
    tracing::error!(step = step.map(|step| step.0), text, "executor fault");
    // The send fails if the reply thread has ended: the peer has closed the link, or the reply thread has
    // failed and reported its failure.
    let _ = outbox.send(OutboxMessage::Message(ExecutorEvent::Fault { step, text }));
}

/// Sends the messages of the queue in order, and the result of each step when the device has finished it: the
/// step output if this rank reports for its replica (`reports_outputs`), `StepDone` otherwise.
fn run_reply_thread<S: MessageSender<Message = ExecutorEvent>>(
    mut link: S,
    outbox_receiver: &Receiver<OutboxMessage>,
    reports_outputs: bool,
) {
    let mut active_trace = ActiveTrace(None);
    send_replies(&mut link, outbox_receiver, &mut active_trace, reports_outputs);
    if let ProfilerStatus::Failed(error) = active_trace.replace(None) {
        tracing::warn!(error, "the last trace is incomplete");
    }
}

fn send_replies<S: MessageSender<Message = ExecutorEvent>>(
    link: &mut S,
    outbox_receiver: &Receiver<OutboxMessage>,
    active_trace: &mut ActiveTrace,
    reports_outputs: bool,
) {
    for outgoing in outbox_receiver {
        let (step, message) = match outgoing {
            OutboxMessage::Message(message) => (None, Ok(message)),
            OutboxMessage::Step(step, submitted) => {
                (Some(step), finish(submitted, reports_outputs))
            }
            OutboxMessage::Trace(next, reply_requested) => match active_trace.replace(next) {
                status if reply_requested => (None, Ok(ExecutorEvent::ProfilerStatus(status))),
                _ => continue,
            },
        };
        let failed = message.is_err();
        let message = message.unwrap_or_else(|text| {
            tracing::error!(step = step.map(|step| step.0), text, "executor fault");
            ExecutorEvent::Fault { step, text }
        });
        if link.send(message).is_err() || failed {
            return; // The send of the next entry fails, which the main thread detects.
        }
    }
}

/// Trace that the finished steps are recorded in; `None` = no trace.
struct ActiveTrace(Option<TraceHandle>);

impl ActiveTrace {
    /// Closes the current trace and makes `next` the current trace. All steps of the closed trace must be
    /// finished.
    fn replace(&mut self, next: Option<TraceHandle>) -> ProfilerStatus {
        let previous = std::mem::replace(&mut self.0, next);
        let closed = previous.as_ref().map_or(Ok(()), TraceHandle::close);
        let name = |trace: &TraceHandle| trace.path().display().to_string();
        match (&self.0, closed) {
            (Some(next), _) => ProfilerStatus::Started(name(next)),
            (None, Ok(())) => {
                let written = previous.as_ref().filter(|trace| trace.path().exists());
                ProfilerStatus::Stopped(written.map(name))
            }
            (None, Err(error)) => ProfilerStatus::Failed(error.to_string()),
        }
    }
}

fn finish(submitted: SubmittedStep, reports_outputs: bool) -> Result<ExecutorEvent, String> {
    let mut output = None;
    let result = catch(|| {
        output = Some(submitted.finish()?);
        Ok(())
    });
    match (result, output) {
        (Err(ExecutorExitReason::Failed(text)), _) => Err(text),
        (_, Some(output)) if reports_outputs => Ok(ExecutorEvent::StepOutput(output)),
        (_, Some(output)) => Ok(done(&output)),
        (_, None) => Err("a step ended without an output".to_owned()),
    }
}

/// Returns the `StepDone` message for a rank that does not report outputs.
fn done(output: &StepOutput) -> ExecutorEvent {
    let timing = &output.timing;
    let ns = timing.inputs_ns + timing.forward_ns + timing.sample_ns;
    ExecutorEvent::StepDone { step: output.step, duration_ns: ns }
}

fn serve<R: MessageReceiver<Message = ExecutorCommand>>(
    config: ExecutorConfig,
    link: &mut R,
    outbox: &SyncSender<OutboxMessage>,
    step: &Cell<Option<StepId>>,
) -> Result<(), ExecutorExitReason> {
    let epoch = config.settings.epoch;
    // All ranks of a replica propose the same draft tokens.
    let reports_drafts = ranks::reports_outputs(&config.settings);
    // A restarted executor records no trace until the next `Profile` command. The executor that it replaces
    // may have ended the trace on an earlier `Profile` command, which the restarted executor has not
    // received.
    let traces_from_start = config.settings.profile_dir.is_some() && epoch.0 <= FIRST_EPOCH;
    send(outbox, ExecutorEvent::Hello(hello(&config)))?;
    let mut progress_reporter = StartupProgressReporter { outbox, last: None, closed: false };
    let mut executor = {
        let exchange = &mut LinkExchange { link, outbox };
        Executor::load_on_hosts(config, exchange, &mut |progress| progress_reporter.send(progress))?
    };
    send(outbox, ExecutorEvent::WeightsLoaded(executor.weights_digest()))?;
    let warm_up_report = executor.warm_up(&mut |progress| progress_reporter.send(progress))?;
    if progress_reporter.closed {
        return Err(ExecutorExitReason::Closed);
    }
    send(outbox, ExecutorEvent::WarmUpDone(warm_up_report))?;
    let mut commands = CommandInbox::new(link, reports_drafts.then_some(outbox));
    loop {
        match commands.next().map_err(ExecutorError::Link)? {
            None | Some(ExecutorCommand::Bitmask(_) | ExecutorCommand::Endpoints(_)) => {}
            Some(ExecutorCommand::Shutdown) => return Ok(()),
            Some(ExecutorCommand::AllocateKv { blocks }) => {
                let ready =
                    executor.size_kv(blocks, &mut |progress| progress_reporter.send(progress))?;
                if traces_from_start {
                    let trace = executor.begin_trace()?;
                    outbox
                        .send(OutboxMessage::Trace(Some(trace), false))
                        .map_err(|_| ExecutorExitReason::Closed)?;
                }
                send(outbox, ExecutorEvent::Ready(ready))?;
            }
            Some(ExecutorCommand::Profile { enabled }) => {
                let outgoing = profile(&mut executor, enabled);
                outbox.send(outgoing).map_err(|_| ExecutorExitReason::Closed)?;
            }
            Some(ExecutorCommand::Batch(batch)) if batch.epoch != epoch => {
                tracing::warn!(
                    step = batch.step.0,
                    epoch = batch.epoch.0,
                    "batch of another epoch"
                );
            }
            Some(ExecutorCommand::Batch(batch)) => {
                step.set(Some(batch.step));
                let submitted = executor.submit_with_bitmasks(&batch, &mut commands)?;
                let outgoing = OutboxMessage::Step(batch.step, submitted);
                outbox.send(outgoing).map_err(|_| ExecutorExitReason::Closed)?;
                step.set(None);
            }
        }
    }
}

/// Starts a trace, or ends the current one. If the trace folder is not writable, the error is reported and
/// the executor continues.
fn profile(executor: &mut Executor, enabled: bool) -> OutboxMessage {
    if !enabled {
        executor.end_trace();
        return OutboxMessage::Trace(None, true);
    }
    match executor.begin_trace() {
        Ok(trace) => OutboxMessage::Trace(Some(trace), true),
        Err(error) => OutboxMessage::Message(ExecutorEvent::ProfilerStatus(
            ProfilerStatus::Failed(error.to_string()),
        )),
    }
}

fn hello(config: &ExecutorConfig) -> ExecutorHello {
    let settings = &config.settings;
    let device = match (settings.device, settings.threads) {
        (DeviceKind::Cpu, None) => "cpu, all cores".to_owned(),
        (DeviceKind::Cpu, Some(n)) => format!("cpu, {n} threads"),
        (DeviceKind::Rocm, _) => "rocm".to_owned(),
        (DeviceKind::Cuda, _) => "cuda".to_owned(),
    };
    ExecutorHello {
        version: PROTOCOL_VERSION,
        rank: settings.rank,
        epoch: settings.epoch,
        device,
        build: env!("CARGO_PKG_VERSION").to_owned(),
        model_digest: config.manifest,
    }
}

fn send(
    outbox: &SyncSender<OutboxMessage>,
    message: ExecutorEvent,
) -> Result<(), ExecutorExitReason> {
    outbox.send(OutboxMessage::Message(message)).map_err(|_| ExecutorExitReason::Closed)
}

/// Sends progress reports of start-up phases at a limited rate. If the link is closed, `closed` is set; the
/// caller checks it when the start-up phases have ended.
struct StartupProgressReporter<'a> {
    outbox: &'a SyncSender<OutboxMessage>,
    last: Option<(StartupPhase, Instant)>,
    closed: bool,
}

impl StartupProgressReporter<'_> {
    fn send(&mut self, StartupPhaseProgress { phase, done, total }: StartupPhaseProgress) {
        let recent =
            self.last.is_some_and(|(of, at)| of == phase && at.elapsed() < PROGRESS_INTERVAL);
        if self.closed || (recent && done < total) {
            return;
        }
        self.last = Some((phase, Instant::now()));
        self.closed = send(self.outbox, ExecutorEvent::Progress { phase, done, total }).is_err();
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no panic message")
}
