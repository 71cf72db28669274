//! The scheduler's thread: drains its inbox, ticks the engine, sends the effects.
//!
//! Owns the engine; sleeps while nothing happens and wakes a few times a second for the heartbeat.
//! A panic here means that the books are wrong: the process dumps and aborts.

use crate::engine_client::{ENGINE_LOST, EngineClient, Inbox, Resident, Signal};
use crate::grammar::MaskWorkers;
use crate::kv_events::Feed;
use crate::launcher::host::Observers;
use crate::launcher::step_deadline::StepDeadline;
use crate::launcher::step_watch::{BatchFacts, StepWatch};
use crate::metrics::Loss;
use protocol::{Epoch, Profiled, Ready, Replica, StepId, ToExecutor};
use scheduler::{Control, Effect, Engine, Event, TokenEvent};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Sender, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Longest sleep of an idle engine: the period of its heartbeat.
const HEARTBEAT: Duration = Duration::from_millis(250);
/// Lists of events that may wait to be handed out before the engine waits too.
pub const LISTS_WAITING_MAX: usize = 64;
/// Lists handed out before streams get a turn.
const LISTS_PER_TURN: usize = 8;

/// Something the main thread must know.
#[derive(Debug)]
pub enum Notice {
    /// The process got this signal.
    Signal(i32),
    /// The executor is lost. The engine has taken note and waits for one of the next generation.
    ExecutorLost {
        /// That generation.
        epoch: Epoch,
        /// What became of the former one.
        cause: String,
    },
    /// There is no executor and will be none; the engine has stopped.
    EngineFailed(String),
}

/// Everything the thread works with.
pub struct EngineThread {
    /// The scheduler.
    pub engine: Engine,
    /// Who hears what the prefix index holds, by replica; empty = nobody.
    pub kv_events: Vec<Feed>,
    /// Where submits and answers arrive.
    pub inbox: Arc<Inbox<Signal>>,
    /// The executor; `None` = it was lost, and the main thread starts another one.
    pub executor: Option<SyncSender<ToExecutor>>,
    /// Whether a lost executor can be replaced: it was a process.
    pub recovers: bool,
    /// Where news of requests go.
    pub news: mpsc::Sender<Vec<TokenEvent>>,
    /// For the end of everything.
    pub client: EngineClient,
    /// Who hears of what it does.
    pub observers: Observers,
    /// When a step is late.
    pub deadline: StepDeadline,
    /// Who makes the masks of constrained requests.
    pub masks: MaskWorkers,
    /// Road to the main thread.
    pub notices: Sender<Notice>,
}

/// The one replica there is.
pub(super) const REPLICA: Replica = Replica(0);

/// A step that has not been answered.
struct Sent {
    step: StepId,
    at_ms: u64,
    tokens: u64,
}

/// What is under way between two looks into the inbox.
struct Desk {
    /// For the next tick.
    events: Vec<Event>,
    /// Steps that have not been answered.
    sent: VecDeque<Sent>,
    watch: Watch,
    clocks: StepWatch,
    /// Who waits for answers of the executor to orders to record, in their order.
    profiling: VecDeque<oneshot::Sender<Profiled>>,
    /// Who waits to hear whether cached prefixes were forgotten, in the order of the orders.
    clearing: VecDeque<oneshot::Sender<bool>>,
    /// Why the executor is given up, if it is.
    lost: Option<(Loss, String)>,
}

impl Desk {
    fn new(clocks: StepWatch) -> Self {
        let (events, sent, watch) = (Vec::new(), VecDeque::new(), Watch::default());
        let (profiling, clearing) = (VecDeque::new(), VecDeque::new());
        Self { events, sent, watch, clocks, profiling, clearing, lost: None }
    }
}

/// How the loop ends.
enum End {
    /// It was told to.
    Stopped,
    /// There is no executor and will be none.
    Failed(String),
}

/// Judges an executor that lives but does not answer. A step is lost only if it was late at two signs of
/// life in a row: had this process been paused, its answer would have arrived in between.
#[derive(Default)]
struct Watch {
    late: Option<StepId>,
}

impl Watch {
    /// At a sign of life: why the executor is given up, if it is.
    fn beat(
        &mut self,
        now_ms: u64,
        sent: &VecDeque<Sent>,
        deadline: &StepDeadline,
    ) -> Option<String> {
        let overdue = sent.front().filter(|first| {
            u128::from(now_ms.saturating_sub(first.at_ms)) > deadline.of(first.tokens).as_millis()
        });
        let again = overdue.filter(|first| self.late == Some(first.step)).map(|first| {
            let (step, after_ms) = (first.step.0, now_ms - first.at_ms);
            let limit_ms = deadline.of(first.tokens).as_millis();
            format!(
                "step {step} is not answered after {after_ms} ms, its deadline is {limit_ms} ms"
            )
        });
        self.late = overdue.map(|first| first.step);
        again
    }
}

impl EngineThread {
    /// Starts the thread.
    pub fn spawn(self) -> std::io::Result<JoinHandle<()>> {
        thread::Builder::new().name("scheduler".to_owned()).spawn(move || {
            let client = self.client.clone();
            if catch_unwind(AssertUnwindSafe(|| self.run())).is_err() {
                let stats = client.stats();
                tracing::error!(?stats, "the scheduler broke an invariant: aborting");
                std::process::abort();
            }
        })
    }

    fn run(mut self) {
        let (mut signals, mut effects) = (Vec::new(), Vec::new());
        let mut desk = Desk::new(StepWatch::new(Arc::clone(&self.observers.metrics)));
        loop {
            desk.clocks.sleeps();
            self.inbox.take(&mut signals, HEARTBEAT);
            desk.clocks.wakes();
            let now_ms = self.observers.health.beat();
            if !self.recovers {
                self.observers.metrics.life.alive(); // The executor lives and dies with this process.
            }
            for signal in signals.drain(..) {
                match self.hear(signal, now_ms, &mut desk) {
                    ControlFlow::Continue(()) => {}
                    ControlFlow::Break(End::Stopped) => return self.stop(),
                    ControlFlow::Break(End::Failed(cause)) => return self.fail(cause),
                }
            }
            let lost = desk.lost.take();
            if let Some((loss, _)) = lost {
                self.lose(loss, &mut desk);
            }
            self.engine.tick_timed(now_ms, &mut desk.events, &mut effects, &mut desk.clocks);
            // The masks of a batch build on what the same tick committed, which comes behind it.
            self.masks.hear(&effects);
            for effect in effects.drain(..) {
                self.act(effect, now_ms, &mut desk);
            }
            self.flush_kv_events();
            self.report_steps(&desk.sent);
            if let Some((_, cause)) = lost {
                let epoch = self.engine.epoch(REPLICA);
                // The main thread may have left already, at shutdown.
                let _ = self.notices.send(Notice::ExecutorLost { epoch, cause });
            }
        }
    }

    /// Takes one signal; breaks if the loop is to end.
    fn hear(&mut self, signal: Signal, now_ms: u64, desk: &mut Desk) -> ControlFlow<End> {
        match signal {
            Signal::Event(event) => {
                self.note_answer(&event, now_ms, desk);
                desk.events.push(event);
            }
            Signal::Guide { request, guide } => self.masks.begin(request, guide),
            Signal::Lost { epoch, loss, cause } if self.is_news(epoch) => {
                if !self.recovers {
                    return ControlFlow::Break(End::Failed(cause));
                }
                desk.lost = Some((loss, cause));
            }
            Signal::Back { executor, ready } => {
                self.executor = Some(executor);
                desk.events.push(back(ready));
                self.observers.health.set_restarted();
            }
            Signal::Profile { on, reply } => self.profile(on, reply, &mut desk.profiling),
            // Whoever asked may have gone.
            Signal::Profiled(epoch, profiled) if self.is_news(epoch) => {
                desk.profiling.pop_front().map(|reply| reply.send(profiled));
            }
            Signal::Lost { .. } | Signal::Profiled(..) => {} // Of a former generation.
            Signal::ClearPrefixCache { restart, reply } => {
                desk.clearing.push_back(reply);
                let op_id = 0; // Answers come in the order of the orders.
                desk.events.push(Event::Control(Control::ClearPrefixCache { op_id, restart }));
            }
            Signal::Resident { reply } if reply.is_closed() => {} // Whoever asked has gone.
            Signal::Resident { reply } => drop(reply.send(self.resident())),
            Signal::Beat => self.executor_lives(now_ms, desk),
            Signal::GiveUp(cause) => return ControlFlow::Break(End::Failed(cause)),
            Signal::Stop => return ControlFlow::Break(End::Stopped),
        }
        ControlFlow::Continue(())
    }

    /// The executor gave a sign of life: is its oldest step late?
    fn executor_lives(&mut self, now_ms: u64, desk: &mut Desk) {
        self.observers.metrics.life.alive();
        let before = desk.watch.late;
        let late = desk.watch.beat(now_ms, &desk.sent, &self.deadline);
        if desk.watch.late.is_some() && desk.watch.late != before {
            self.observers.metrics.life.late();
        }
        desk.lost = desk.lost.take().or(late.map(|cause| (Loss::Late, cause)));
    }

    /// Whether a loss is of the executor that works now.
    fn is_news(&self, epoch: Epoch) -> bool {
        self.executor.is_some() && epoch == self.engine.epoch(REPLICA)
    }

    /// Takes note that the executor is gone: what it had is computed again by the next one.
    fn lose(&mut self, loss: Loss, desk: &mut Desk) {
        self.executor = None;
        desk.profiling.clear();
        desk.clocks.lost();
        desk.sent.clear();
        self.observers.metrics.life.lost(loss);
        self.observers.health.set_restarting();
        desk.events.push(Event::Lost { replica: REPLICA });
    }

    fn act(&mut self, effect: Effect, now_ms: u64, desk: &mut Desk) {
        match effect {
            Effect::Send { batch, .. } => {
                let facts = BatchFacts::of(&batch);
                let (step, tokens) = (batch.step, facts.tokens);
                desk.sent.push_back(Sent { step, at_ms: now_ms, tokens });
                let expected = self.expected(&desk.sent);
                if let Some(executor) = &self.executor {
                    let masked = self.masks.rows_of(&batch);
                    // One that is gone says so on its own road, with the reason.
                    let _ = executor.send(ToExecutor::Batch(batch));
                    if !masked.is_empty() {
                        self.masks.make(step, masked, executor, expected);
                    }
                }
                desk.clocks.sent(&facts, now_ms);
            }
            // A closed channel means that nobody is left to hear the news.
            Effect::Tokens(list) => drop(self.news.blocking_send(list)),
            Effect::Stats(stats) => {
                desk.clocks.counted(&stats);
                self.client.set_stats(stats);
            }
            Effect::Kv { replica, events } => {
                if let Some(feed) = self.kv_events.get_mut(usize::from(replica.0)) {
                    feed.gather(events);
                }
            }
            // Whoever asked may have gone.
            Effect::ControlDone { done, .. } => {
                desk.clearing.pop_front().map(|reply| reply.send(done));
            }
        }
    }

    /// Time until the newest of these steps is answered, if all goes well; never so long that waiting for it would
    /// make it late.
    fn expected(&self, sent: &VecDeque<Sent>) -> Duration {
        let expected = sent.iter().map(|step| self.deadline.expected(step.tokens)).sum();
        let newest = sent.back().map_or(Duration::ZERO, |step| self.deadline.of(step.tokens) / 2);
        newest.min(expected)
    }

    /// Hands over what this tick changed in the prefix indices.
    fn flush_kv_events(&mut self) {
        for (feed, replica) in self.kv_events.iter_mut().zip(0..) {
            feed.flush(|| self.engine.kv(Replica(replica)).listing());
        }
    }

    /// Passes an order to record on; the answers come in the order of the orders.
    fn profile(
        &self,
        on: bool,
        reply: oneshot::Sender<Profiled>,
        waiting: &mut VecDeque<oneshot::Sender<Profiled>>,
    ) {
        // A full road is no reason to wait: the order is dropped, and its sender hears that nobody answers.
        let sent = self.executor.as_ref().map(|to| to.try_send(ToExecutor::Profile { on }));
        if let Some(Ok(())) = sent {
            waiting.push_back(reply);
        }
    }

    /// Measures the step an answer belongs to.
    fn note_answer(&mut self, event: &Event, now_ms: u64, desk: &mut Desk) {
        let Event::Output { output, .. } = event else { return };
        desk.clocks.answered(output);
        while let Some(first) = desk.sent.pop_front_if(|s| s.step <= output.step) {
            let took = Duration::from_millis(now_ms.saturating_sub(first.at_ms));
            self.deadline.note(first.tokens, took);
            // The device gets to a step only after its predecessor.
            if let Some(next) = desk.sent.front_mut() {
                next.at_ms = next.at_ms.max(now_ms);
            }
        }
    }

    fn report_steps(&self, sent: &VecDeque<Sent>) {
        match sent.front() {
            None => self.observers.health.steps_answered(),
            Some(first) => {
                let deadline_ms = self.deadline.of(first.tokens).as_millis() as u64;
                self.observers.health.step_sent(first.at_ms, deadline_ms);
            }
        }
    }

    /// What the prefix index holds now.
    fn resident(&self) -> Vec<Resident> {
        let blocks = self.client.stats().blocks;
        vec![Resident::of(&self.engine, REPLICA, blocks)]
    }

    fn stop(self) {
        if let Some(executor) = &self.executor {
            // One that is gone needs no order to leave.
            let _ = executor.send(ToExecutor::Shutdown);
        }
    }

    /// There will be no executor any more: every request ends, and the process will.
    fn fail(self, text: String) {
        self.observers.health.set_unavailable();
        self.client.end_all(&ENGINE_LOST);
        // The main thread may have left already, at shutdown.
        let _ = self.notices.send(Notice::EngineFailed(text));
    }
}

fn back(ready: Ready) -> Event {
    let Ready { blocks, graph_rows } = ready;
    Event::Ready { replica: REPLICA, blocks, graph_rows }
}

/// Hands out lists of events for as long as the engine lives.
pub async fn fan_out(client: EngineClient, mut news: mpsc::Receiver<Vec<TokenEvent>>) {
    let mut lists = Vec::with_capacity(LISTS_PER_TURN);
    while news.recv_many(&mut lists, LISTS_PER_TURN).await > 0 {
        for list in lists.drain(..) {
            client.deliver(list);
        }
        tokio::task::yield_now().await; // The streams just woken write before more is handed out.
    }
}
