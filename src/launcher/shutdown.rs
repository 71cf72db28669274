//! The end of a server: drain, second signal, failed engine.

use engine::{EngineHost, ServiceEnd, SupervisorEvent, SupervisorState, supervise};
use scheduler::{AbortCause, FinishReason, StepStats};
use server::AppState;
use server::listener::ConnectionLimiter;
use std::process::ExitCode;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// How often a drain looks whether it is done.
const POLL: Duration = Duration::from_millis(10);
/// Time for the last bytes of streams that were ended.
const FLUSH: Duration = Duration::from_millis(1_500);
/// Time for the last lines of `--trace-requests`, and for what is left of it after a drain that took all of its time: a disk that
/// takes longer keeps no server alive.
const TRACE_WAIT: Duration = Duration::from_secs(5);
const TRACE_WAIT_MIN: Duration = Duration::from_millis(200);
/// Time for the executor's last step, and for what is left of it after such a drain.
const EXECUTOR_WAIT: Duration = Duration::from_secs(5);
const EXECUTOR_WAIT_MIN: Duration = Duration::from_millis(300);
/// Exit code after a failure at run time.
pub const EXIT_CODE_FATAL: u8 = 3;

/// What faces clients.
pub struct ServerFrontend<'a> {
    /// Handlers and health.
    pub app: &'a AppState,
    /// Open sockets.
    pub connections: &'a ConnectionLimiter,
    /// Where they live.
    pub runtime: &'a Handle,
}

impl ServerFrontend<'_> {
    /// Serves until told to stop, or until nothing can be served any more. Returns the process's exit code.
    ///
    /// `timeout`: how long streams may run on after a signal.
    pub fn serve(
        &self,
        host: EngineHost,
        mut supervised: SupervisorState,
        timeout: Duration,
    ) -> ExitCode {
        match supervise(&self.app.health, &host, &mut supervised) {
            ServiceEnd::Signal(number) => {
                // Where nobody computes, streams have nothing to wait for.
                let timeout = if supervised.serves() { timeout } else { Duration::ZERO };
                self.drain(number, timeout, host, supervised)
            }
            ServiceEnd::Failed(text) => self.fail(&text),
        }
    }

    /// Lets streams run out, ends the rest after `timeout`, stops the engine and its executor.
    fn drain(
        &self,
        signal: i32,
        timeout: Duration,
        host: EngineHost,
        mut supervised: SupervisorState,
    ) -> ExitCode {
        tracing::info!(signal, "draining");
        self.app.health.set_draining();
        let deadline = Instant::now() + timeout;
        let busy =
            || host.client.requests_in_flight() > 0 || host.client.admission().requests() > 0;
        while busy() && Instant::now() < deadline {
            match supervised.events.recv_timeout(POLL) {
                Ok(SupervisorEvent::Signal(number)) => return second_signal_exit_code(number),
                Ok(SupervisorEvent::EngineFailed(text)) => return self.fail(&text),
                // Nobody starts them again: what no other replica takes over cannot go on.
                Ok(SupervisorEvent::ExecutorsFailed { replica, cause, .. }) => {
                    let replica_lost = replica.0;
                    tracing::error!(replica_lost, cause, "executors were lost during the drain");
                    supervised.set_serving(replica, false);
                    if !supervised.serves() {
                        break;
                    }
                }
                // Executors that come up now are too late to be of use.
                Ok(SupervisorEvent::StartFinished { .. })
                | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
        let cut = host.client.close(&FinishReason::Abort(AbortCause::Shutdown));
        if cut > 0 {
            tracing::warn!(outputs = cut, ?timeout, "the drain ends outputs that are not complete");
        }
        if !self.close() {
            tracing::warn!("some connections did not take their last bytes");
        }
        if let Ok(SupervisorEvent::Signal(number)) = supervised.events.try_recv() {
            return second_signal_exit_code(number);
        }
        self.write_trace(deadline);
        log_totals(&host.client.replica_stats());
        host.stop();
        // A drain that took its whole time leaves the executor little.
        let left = deadline.saturating_duration_since(Instant::now());
        supervised.shut_down(left.clamp(EXECUTOR_WAIT_MIN, EXECUTOR_WAIT));
        ExitCode::SUCCESS
    }

    /// Every request has been ended already; their last bytes get a moment.
    fn fail(&self, text: &str) -> ExitCode {
        tracing::error!(text, "fatal");
        self.close();
        self.write_trace(Instant::now() + TRACE_WAIT);
        ExitCode::from(EXIT_CODE_FATAL)
    }

    /// Writes the lines of requests that have ended, until `deadline` or a little longer.
    fn write_trace(&self, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now());
        let Some(tracer) = &self.app.options.tracer else { return };
        if !tracer.flush(left.clamp(TRACE_WAIT_MIN, TRACE_WAIT)) {
            tracing::warn!(lost = tracer.dropped_lines(), "lines of --trace-requests are missing");
        }
    }

    /// Closes the connections; whether all took their last bytes in time.
    fn close(&self) -> bool {
        let closing = async { tokio::time::timeout(FLUSH, self.connections.close()).await };
        self.runtime.block_on(closing).is_ok()
    }
}

/// What was done over the life of the process, in one line.
fn log_totals(replicas: &[StepStats]) {
    let sum = |of: fn(&StepStats) -> u64| replicas.iter().map(of).sum::<u64>();
    tracing::info!(
        steps = sum(|stats| stats.steps_total),
        prompt_tokens = sum(|stats| stats.prompt_tokens_total),
        generated_tokens = sum(|stats| stats.generated_tokens_total),
        prefix_hits = sum(|stats| stats.prefix_hits_total),
        preemptions = sum(|stats| stats.preemptions_total),
        "drained"
    );
}

/// The exit code after a second signal.
pub(super) fn second_signal_exit_code(number: i32) -> ExitCode {
    tracing::warn!(signal = number, "second signal: stopping at once");
    ExitCode::from(128_u8.saturating_add(number as u8))
}
