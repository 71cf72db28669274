//! An executor at the end of a link: start-up in the agreed order, then a reply to every batch.
//!
//! Any failure, a panic included, becomes one `Fault` message, and the executor is gone: whoever
//! holds the other end starts another one. A closed link is an order to leave, not a failure.

use crate::orders::Orders;
use crate::{Executor, ExecutorConfig, ExecutorError, Progress, Submitted, Trace, ranks};
use protocol::link::{Link, LinkError, Receiving, Sending};
use protocol::{
    Device, FromExecutor, Hello, PROTOCOL_VERSION, Phase, Profiled, StepId, StepOutput, ToExecutor,
};
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// Progress is reported at most this often, so that a slow reader does not hold up the load.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Messages and steps that may wait for the answering thread: more than a scheduler has in flight.
const OUTBOX: usize = 8;

/// Generation of an executor that has no predecessor.
const FIRST_EPOCH: u64 = 1;

/// Runs an executor on this thread until `Shutdown`, until the peer leaves, or until it fails.
///
/// Steps are submitted here and answered by a thread of their own, so that the device gets the next step
/// while somebody waits for this one.
pub fn run<L>(config: ExecutorConfig, link: L)
where
    L: Link<Out = FromExecutor, In = ToExecutor>,
{
    let (sender, mut receiver) = link.split();
    let (outbox, waiting) = sync_channel(OUTBOX);
    let speaks = ranks::answers(&config.settings);
    let Ok(answers) = thread::Builder::new()
        .name("answers".to_owned())
        .spawn(move || answer(sender, &waiting, speaks))
    else {
        tracing::error!("the system gives no thread to answer with"); // The link closes, and that is seen.
        return;
    };
    let step = Cell::new(None);
    let ending = catch(|| serve(config, &mut receiver, &outbox, &step));
    if let Err(Stop::Failed(text)) = ending {
        fault(&outbox, step.get(), text);
    }
    drop(outbox);
    // It ends with the last message, or with a peer that is gone; a panic in it has become a fault.
    let _ = answers.join();
}

/// What goes out, in order.
#[allow(clippy::large_enum_variant, reason = "a handful exist at a time")]
enum Outgoing {
    Message(FromExecutor),
    Step(StepId, Submitted),
    /// The steps behind this go into another trace, or into none; whether somebody waits to hear of it.
    Trace(Option<Trace>, bool),
}

/// Why serving ended.
enum Stop {
    Closed,
    Failed(String),
}

impl<E: Into<ExecutorError>> From<E> for Stop {
    fn from(error: E) -> Self {
        match error.into() {
            ExecutorError::Link(LinkError::Closed) => Self::Closed,
            error => Self::Failed(error.to_string()),
        }
    }
}

/// Turns a panic into a failure.
fn catch(work: impl FnOnce() -> Result<(), Stop>) -> Result<(), Stop> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(Stop::Failed(format!("panic: {}", panic_text(panic.as_ref())))))
}

fn fault(outbox: &SyncSender<Outgoing>, step: Option<StepId>, text: String) {
    tracing::error!(step = step.map(|step| step.0), text, "executor fault");
    // If the answering thread is gone, so is the peer, or it has told of a failure of its own.
    let _ = outbox.send(Outgoing::Message(FromExecutor::Fault { step, text }));
}

/// Sends messages as they come, and the results of steps as the device finishes them: the outputs if this rank
/// `speaks` for its replica, else that they are over.
fn answer<S: Sending<Message = FromExecutor>>(
    mut link: S,
    waiting: &Receiver<Outgoing>,
    speaks: bool,
) {
    let mut traces = Traces(None);
    answer_all(&mut link, waiting, &mut traces, speaks);
    if let Profiled::Failed(error) = traces.replace(None) {
        tracing::warn!(error, "the last trace is not complete");
    }
}

fn answer_all<S: Sending<Message = FromExecutor>>(
    link: &mut S,
    waiting: &Receiver<Outgoing>,
    traces: &mut Traces,
    speaks: bool,
) {
    for outgoing in waiting {
        let (step, message) = match outgoing {
            Outgoing::Message(message) => (None, Ok(message)),
            Outgoing::Step(step, submitted) => (Some(step), finish(submitted, speaks)),
            Outgoing::Trace(next, asked) => match traces.replace(next) {
                profiled if asked => (None, Ok(FromExecutor::Profiled(profiled))),
                _ => continue,
            },
        };
        let failed = message.is_err();
        let message = message.unwrap_or_else(|text| {
            tracing::error!(step = step.map(|step| step.0), text, "executor fault");
            FromExecutor::Fault { step, text }
        });
        if link.send(message).is_err() || failed {
            return; // Whoever still sends here notices.
        }
    }
}

/// The trace that steps go into, if there is one.
struct Traces(Option<Trace>);

impl Traces {
    /// Closes the trace, now that its last step is over, and goes on with another one.
    fn replace(&mut self, next: Option<Trace>) -> Profiled {
        let former = std::mem::replace(&mut self.0, next);
        let closed = former.as_ref().map_or(Ok(()), Trace::close);
        let name = |trace: &Trace| trace.path().display().to_string();
        match (&self.0, closed) {
            (Some(next), _) => Profiled::Started(name(next)),
            (None, Ok(())) => {
                let left = former.as_ref().filter(|trace| trace.path().exists());
                Profiled::Stopped(left.map(name))
            }
            (None, Err(error)) => Profiled::Failed(error.to_string()),
        }
    }
}

fn finish(submitted: Submitted, speaks: bool) -> Result<FromExecutor, String> {
    let mut output = None;
    let ending = catch(|| {
        output = Some(submitted.finish()?);
        Ok(())
    });
    match (ending, output) {
        (Err(Stop::Failed(text)), _) => Err(text),
        (_, Some(output)) if speaks => Ok(FromExecutor::StepOutput(output)),
        (_, Some(output)) => Ok(done(&output)),
        (_, None) => Err("a step ended without a result".to_owned()),
    }
}

/// What is left to say where another rank answers.
fn done(output: &StepOutput) -> FromExecutor {
    let timing = &output.timing;
    let ns = timing.inputs_ns + timing.forward_ns + timing.sample_ns;
    FromExecutor::StepDone { step: output.step, ns }
}

fn serve<R: Receiving<Message = ToExecutor>>(
    config: ExecutorConfig,
    link: &mut R,
    outbox: &SyncSender<Outgoing>,
    step: &Cell<Option<StepId>>,
) -> Result<(), Stop> {
    let epoch = config.settings.epoch;
    // Orders given to a predecessor are not known here: after a restart recording waits for the next one.
    let traces = config.settings.profile.is_some() && epoch.0 <= FIRST_EPOCH;
    send(outbox, FromExecutor::Hello(hello(&config)))?;
    let mut reports = Reports { outbox, last: None, closed: false };
    let mut executor = Executor::load(config, &mut |progress| reports.send(progress))?;
    send(outbox, FromExecutor::Loaded(executor.weights_digest()))?;
    let memory = executor.warm_up(&mut |progress| reports.send(progress))?;
    if reports.closed {
        return Err(Stop::Closed);
    }
    send(outbox, FromExecutor::Memory(memory))?;
    let mut orders = Orders::new(link);
    loop {
        match orders.next().map_err(ExecutorError::Link)? {
            None | Some(ToExecutor::Mask(_)) => {}
            Some(ToExecutor::Shutdown) => return Ok(()),
            Some(ToExecutor::SizeKv { blocks }) => {
                let ready = executor.size_kv(blocks, &mut |progress| reports.send(progress))?;
                if traces {
                    let trace = executor.begin_trace()?;
                    outbox.send(Outgoing::Trace(Some(trace), false)).map_err(|_| Stop::Closed)?;
                }
                send(outbox, FromExecutor::Ready(ready))?;
            }
            Some(ToExecutor::Profile { on }) => {
                let outgoing = profile(&mut executor, on);
                outbox.send(outgoing).map_err(|_| Stop::Closed)?;
            }
            Some(ToExecutor::Batch(batch)) if batch.epoch != epoch => {
                tracing::warn!(
                    step = batch.step.0,
                    epoch = batch.epoch.0,
                    "batch of another epoch"
                );
            }
            Some(ToExecutor::Batch(batch)) => {
                step.set(Some(batch.step));
                let submitted = executor.submit_masked(&batch, &mut orders)?;
                let outgoing = Outgoing::Step(batch.step, submitted);
                outbox.send(outgoing).map_err(|_| Stop::Closed)?;
                step.set(None);
            }
        }
    }
}

/// Begins a trace, or ends the one under way; a folder that cannot be written is no reason to stop computing.
fn profile(executor: &mut Executor, on: bool) -> Outgoing {
    if !on {
        executor.end_trace();
        return Outgoing::Trace(None, true);
    }
    match executor.begin_trace() {
        Ok(trace) => Outgoing::Trace(Some(trace), true),
        Err(error) => {
            Outgoing::Message(FromExecutor::Profiled(Profiled::Failed(error.to_string())))
        }
    }
}

fn hello(config: &ExecutorConfig) -> Hello {
    let settings = &config.settings;
    let device = match (settings.device, settings.threads) {
        (Device::Cpu, None) => "cpu, all cores".to_owned(),
        (Device::Cpu, Some(n)) => format!("cpu, {n} threads"),
        (Device::Rocm, _) => "rocm".to_owned(),
        (Device::Cuda, _) => "cuda".to_owned(),
    };
    Hello {
        version: PROTOCOL_VERSION,
        rank: settings.rank,
        epoch: settings.epoch,
        device,
        build: env!("CARGO_PKG_VERSION").to_owned(),
        manifest: config.manifest,
    }
}

fn send(outbox: &SyncSender<Outgoing>, message: FromExecutor) -> Result<(), Stop> {
    outbox.send(Outgoing::Message(message)).map_err(|_| Stop::Closed)
}

/// Sends progress, not too often, but of every phase; a peer that left is noticed once the phase is over.
struct Reports<'a> {
    outbox: &'a SyncSender<Outgoing>,
    last: Option<(Phase, Instant)>,
    closed: bool,
}

impl Reports<'_> {
    fn send(&mut self, Progress { phase, done, total }: Progress) {
        let recent =
            self.last.is_some_and(|(of, at)| of == phase && at.elapsed() < PROGRESS_INTERVAL);
        if self.closed || (recent && done < total) {
            return;
        }
        self.last = Some((phase, Instant::now()));
        self.closed = send(self.outbox, FromExecutor::Progress { phase, done, total }).is_err();
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
