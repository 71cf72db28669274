//! Watchdog thread that takes over a dry run when the idle-priority thread gets no processor time.
//!
//! A thread with idle priority gets about 0.3 % of a processor that is fully used by other threads, which is
//! not enough for any grammar. The watchdog thread has low but not idle priority. It repeats the dry run when
//! the idle-priority thread is starved, early enough to get `DRY_RUN_CPU_TIME_MIN` before the end of
//! `COMPILE_TIME`.

use super::message::GrammarWorkerReply;
use crate::compile::{DryRunReport, GrammarError};
use crate::constraint::OutputConstraint;
use crate::limits::{COMPILE_TIME, DRY_RUN_CPU_TIME_MIN};
use crate::lock;
use protocol::link::{FrameWriter, LinkError, MessageSender};
use rustix::time::{ClockId, clock_gettime};
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Result of a dry run (test compilation of a grammar): a report, or the reason why the grammar is
/// rejected.
type DryRunVerdict = Result<DryRunReport, GrammarError>;

/// Interval at which the watchdog checks whether a dry run is starved of processor time. The watchdog
/// polls, because waking it at the start of every dry run would cost processor time.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Wall-clock time after which a dry run (test compilation) that has had less than `DRY_RUN_CPU_TIME_MIN`
/// of processor time counts as starved.
const STARVED_AFTER: Duration = Duration::from_millis(300);
/// Number of consecutive checks without a dry run (test compilation) after which the thread stops polling
/// and sleeps until the next dry run.
const IDLE_CHECKS_MAX: u32 = 20;

/// Dry run (test compilation of a grammar) whose result the server waits for.
pub(super) struct GrammarDryRun {
    pub(super) constraint: Arc<OutputConstraint>,
    started_at: Instant,
    /// Processor time used by this process before the dry run.
    cpu_at_start: Duration,
}

impl GrammarDryRun {
    pub(super) fn begin(constraint: Arc<OutputConstraint>) -> Self {
        Self { constraint, started_at: Instant::now(), cpu_at_start: process_cpu_time() }
    }

    /// Whether the dry run is starved: it has had too little processor time, or it has run for longer than
    /// `COMPILE_TIME`, after which the server waits only for starved dry runs.
    fn is_starved(&self) -> bool {
        let age = self.started_at.elapsed();
        let cpu_time = process_cpu_time().saturating_sub(self.cpu_at_start);
        age > COMPILE_TIME || age > STARVED_AFTER && cpu_time < DRY_RUN_CPU_TIME_MIN
    }
}

/// Returns the processor time of all threads of this process.
fn process_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Sends the result (verdict) of the current dry run to the server. If two threads perform the same dry
/// run, only the first result is sent.
pub(super) struct DryRunVerdictSender<W> {
    state: Mutex<DryRunVerdictSenderState<W>>,
    dry_run_started: Condvar,
}

/// Writer of the replies to the server, and the dry run whose result has not been sent.
struct DryRunVerdictSenderState<W> {
    replies: FrameWriter<W, GrammarWorkerReply>,
    /// The current dry run (test compilation of a grammar), until its result is sent.
    pending: Option<Arc<GrammarDryRun>>,
}

impl<W: Write> DryRunVerdictSender<W> {
    /// Creates a sender that writes messages to `replies`.
    pub(super) fn new(replies: FrameWriter<W, GrammarWorkerReply>) -> Self {
        Self {
            state: Mutex::new(DryRunVerdictSenderState { replies, pending: None }),
            dry_run_started: Condvar::new(),
        }
    }

    /// Sends a message.
    ///
    /// Errors: the server has closed the connection.
    pub(super) fn send(&self, message: GrammarWorkerReply) -> Result<(), LinkError> {
        lock(&self.state).replies.send(message)
    }

    /// Registers a dry run whose result (verdict) must be sent to the server.
    pub(super) fn begin(&self, dry_run: &Arc<GrammarDryRun>) {
        lock(&self.state).pending = Some(Arc::clone(dry_run));
        self.dry_run_started.notify_one();
    }

    /// Sends the result of a dry run to the server, unless a result of this dry run has already been sent.
    ///
    /// Errors: the server has closed the connection.
    pub(super) fn report_verdict(
        &self,
        dry_run: &Arc<GrammarDryRun>,
        verdict: DryRunVerdict,
    ) -> Result<(), LinkError> {
        let mut state = lock(&self.state);
        let open = state.pending.take_if(|pending| Arc::ptr_eq(pending, dry_run));
        open.map_or(Ok(()), |_| state.replies.send(GrammarWorkerReply::Verdict(verdict)))
    }

    fn pending(&self) -> Option<Arc<GrammarDryRun>> {
        lock(&self.state).pending.clone()
    }

    fn wait_for_dry_run(&self) {
        let is_idle = |state: &mut DryRunVerdictSenderState<W>| state.pending.is_none();
        drop(
            self.dry_run_started
                .wait_while(lock(&self.state), is_idle)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
}

/// Checks for starved dry runs (test compilations that get too little processor time) and repeats them on
/// this thread, until an error occurs.
///
/// Errors: the server has closed the connection.
pub(super) fn take_over_starved<W: Write>(
    verdicts: &DryRunVerdictSender<W>,
    run_dry_run: impl Fn(&GrammarDryRun) -> DryRunVerdict,
) -> Result<(), LinkError> {
    loop {
        verdicts.wait_for_dry_run();
        let mut idle_checks = 0;
        while idle_checks < IDLE_CHECKS_MAX {
            thread::sleep(CHECK_INTERVAL);
            match verdicts.pending() {
                Some(dry_run) if dry_run.is_starved() => {
                    verdicts.report_verdict(&dry_run, run_dry_run(&dry_run))?;
                }
                Some(_) => idle_checks = 0,
                None => idle_checks += 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GrammarSpec;
    use crate::worker_process::EPOCH;
    use protocol::link::{FrameReader, MessageReceiver};
    use std::os::unix::net::UnixStream;

    const WAIT: Duration = Duration::from_mins(1);

    fn verdict(text: &str) -> DryRunVerdict {
        Err(GrammarError::Invalid(text.to_owned()))
    }

    #[test]
    fn starved_dry_run_is_taken_over_and_has_one_verdict() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut server = FrameReader::<_, GrammarWorkerReply>::new(ours, EPOCH);
        let verdicts = Arc::new(DryRunVerdictSender::new(FrameWriter::new(theirs, EPOCH)));
        let watchdog_verdicts = Arc::clone(&verdicts);
        thread::spawn(move || take_over_starved(&watchdog_verdicts, |_| verdict("watch")));
        let begin = || {
            let spec = GrammarSpec::Regex("a".to_owned());
            let dry_run =
                Arc::new(GrammarDryRun::begin(Arc::new(OutputConstraint::new(spec, "regex"))));
            verdicts.begin(&dry_run);
            dry_run
        };
        // The watchdog sleeps before the first dry run, and polls when the second one starts.
        for _ in 0..2 {
            let start = Instant::now();
            let first = begin();
            let reply = server.recv(WAIT).unwrap();
            assert_eq!(reply, Some(GrammarWorkerReply::Verdict(verdict("watch"))));
            assert!(start.elapsed() > STARVED_AFTER, "the watchdog waited before it took over");
            verdicts.report_verdict(&first, verdict("late")).unwrap();
            let second = begin();
            verdicts.report_verdict(&second, verdict("quick")).unwrap();
            let reply = server.recv(WAIT).unwrap();
            let quick = GrammarWorkerReply::Verdict(verdict("quick"));
            assert_eq!(reply, Some(quick), "the second verdict of the first dry run is dropped");
        }
    }
}
