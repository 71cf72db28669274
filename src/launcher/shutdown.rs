//! Shutdown of a server: drain after a signal, immediate exit after a second signal, and exit after a
//! failure.

use engine::{RunningEngine, ServiceEndReason, SupervisorEvent, SupervisorState, supervise};
use scheduler::{AbortCause, FinishReason, SchedulerStats};
use server::AppState;
use server::listener::ConnectionLimiter;
use std::process::ExitCode;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// Interval at which a drain (the wait for running requests at shutdown) checks whether all requests have
/// finished.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Timeout for sending the remaining data of streams that have ended.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(1_500);
/// Timeout for writing the `--trace-requests` file at shutdown. It is bounded so that a slow disk cannot
/// delay the exit.
const TRACE_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum time for writing the `--trace-requests` file. It is used if the drain has taken all of
/// `--shutdown-timeout`.
const TRACE_TIMEOUT_MIN: Duration = Duration::from_millis(200);
/// Maximum time for executors to finish their last step at shutdown.
const EXECUTOR_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum time for executors to finish their last step. It is used if the drain has taken all of
/// `--shutdown-timeout`.
const EXECUTOR_TIMEOUT_MIN: Duration = Duration::from_millis(300);
/// Exit code of the process after a fatal failure at run time.
pub const EXIT_CODE_FATAL: u8 = 3;

/// HTTP part of a server, which a shutdown drains and closes.
pub struct ServerFrontend<'a> {
    /// State of the request handlers and health of the server.
    pub app: &'a AppState,
    /// Limiter and list of open connections.
    pub connections: &'a ConnectionLimiter,
    /// Tokio runtime of the connections.
    pub runtime: &'a Handle,
}

impl ServerFrontend<'_> {
    /// Serves until a shutdown signal arrives or the server fails. Returns the exit code of the process.
    ///
    /// `timeout`: maximum time after a signal for running streams to finish.
    pub fn serve(
        &self,
        host: RunningEngine,
        mut supervisor: SupervisorState,
        timeout: Duration,
    ) -> ExitCode {
        match supervise(&self.app.health, &host, &mut supervisor) {
            ServiceEndReason::Signal(number) => {
                // If no executors run, streams make no progress, so the drain does not wait for them.
                let timeout = if supervisor.serves() { timeout } else { Duration::ZERO };
                self.drain(number, timeout, host, supervisor)
            }
            ServiceEndReason::Failed(text) => self.fail(&text),
        }
    }

    /// Waits for running streams, aborts the remaining ones after `timeout`, and stops the engine and its
    /// executors.
    fn drain(
        &self,
        signal: i32,
        timeout: Duration,
        host: RunningEngine,
        mut supervisor: SupervisorState,
    ) -> ExitCode {
        tracing::info!(signal, "draining");
        self.app.health.set_draining();
        let deadline = Instant::now() + timeout;
        let is_busy =
            || host.client.requests_in_flight() > 0 || host.client.admission().requests() > 0;
        while is_busy() && Instant::now() < deadline {
            match supervisor.events.recv_timeout(DRAIN_POLL_INTERVAL) {
                Ok(SupervisorEvent::Signal(number)) => return second_signal_exit_code(number),
                Ok(SupervisorEvent::EngineFailed(text)) => return self.fail(&text),
                // Executors are not restarted during a drain. Requests of the failed replica that cannot move
                // to another replica are aborted.
                Ok(SupervisorEvent::ExecutorsFailed { replica, cause, .. }) => {
                    let failed_replica = replica.0;
                    tracing::error!(
                        replica_lost = failed_replica,
                        cause,
                        "executors failed during the drain"
                    );
                    supervisor.set_serving(replica, false);
                    if !supervisor.serves() {
                        break;
                    }
                }
                // Executors that become ready during a drain are not used.
                Ok(SupervisorEvent::StartFinished { .. })
                | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
        let aborted = host.client.close(&FinishReason::Abort(AbortCause::Shutdown));
        if aborted > 0 {
            tracing::warn!(
                outputs = aborted,
                timeout_s = timeout.as_secs_f64(),
                "drain timeout: incomplete outputs are aborted"
            );
        }
        if !self.close() {
            tracing::warn!("some connections could not be flushed in time");
        }
        if let Ok(SupervisorEvent::Signal(number)) = supervisor.events.try_recv() {
            return second_signal_exit_code(number);
        }
        self.write_trace(deadline);
        log_totals(&host.client.replica_stats());
        host.stop();
        // Executors get the rest of `--shutdown-timeout`, but at least `EXECUTOR_TIMEOUT_MIN`.
        let remaining = deadline.saturating_duration_since(Instant::now());
        supervisor.shut_down(remaining.clamp(EXECUTOR_TIMEOUT_MIN, EXECUTOR_TIMEOUT));
        ExitCode::SUCCESS
    }

    /// Ends the server after a fatal failure. All requests have been aborted; the remaining data of their
    /// streams is sent.
    fn fail(&self, text: &str) -> ExitCode {
        tracing::error!(text, "fatal");
        self.close();
        self.write_trace(Instant::now() + TRACE_TIMEOUT);
        ExitCode::from(EXIT_CODE_FATAL)
    }

    /// Exports the spans and writes the trace lines of finished requests. Stops at `deadline`, but takes at
    /// least `TRACE_TIMEOUT_MIN` if necessary.
    fn write_trace(&self, deadline: Instant) {
        let remaining = || {
            let remaining = deadline.saturating_duration_since(Instant::now());
            remaining.clamp(TRACE_TIMEOUT_MIN, TRACE_TIMEOUT)
        };
        if let Some(spans) = &self.app.options.spans
            && !spans.close(remaining())
        {
            tracing::warn!("not all spans were exported to --otlp-traces-endpoint");
        }
        let Some(tracer) = &self.app.options.tracer else { return };
        if !tracer.flush(remaining()) {
            tracing::warn!(
                lost = tracer.dropped_lines(),
                "the --trace-requests file is incomplete"
            );
        }
    }

    /// Closes all connections. Returns whether their remaining data was sent before `FLUSH_TIMEOUT`.
    fn close(&self) -> bool {
        let closing = async { tokio::time::timeout(FLUSH_TIMEOUT, self.connections.close()).await };
        self.runtime.block_on(closing).is_ok()
    }
}

/// Logs the total numbers of steps, tokens and preemptions since the start.
fn log_totals(replicas: &[SchedulerStats]) {
    let sum = |field: fn(&SchedulerStats) -> u64| replicas.iter().map(field).sum::<u64>();
    tracing::info!(
        steps = sum(|stats| stats.steps_total),
        prompt_tokens = sum(|stats| stats.prompt_tokens_total),
        generated_tokens = sum(|stats| stats.generated_tokens_total),
        prefix_hits = sum(|stats| stats.prefix_hits_total),
        preemptions = sum(|stats| stats.preemptions_total),
        "drained"
    );
}

/// Logs a second signal and returns the exit code for it.
pub(super) fn second_signal_exit_code(number: i32) -> ExitCode {
    tracing::warn!(signal = number, "second signal: stopping immediately");
    ExitCode::from(128_u8.saturating_add(number as u8))
}
