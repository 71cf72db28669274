//! Converts command-line arguments into the start and restart policy of executors.

use super::settings;
use crate::config::ServeArgs;
use engine::{RestartPolicy, StartPolicy, StartTimeouts};
use protocol::DeviceKind;
use std::time::Duration;

/// Timeout for the `Hello` message of a newly started executor.
const HELLO_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time without a progress report while an executor starts on a GPU.
const STALL_TIMEOUT: Duration = Duration::from_mins(1);
/// Time window in which failures of executors that had become ready are counted for
/// `--max-executor-restarts`.
const SERVICE_WINDOW: Duration = Duration::from_mins(10);

/// Returns the start and restart policy of executors. `jitter_seed`: seed of the random variation of the
/// back-off between restarts.
pub(super) fn start_policy(args: &ServeArgs, jitter_seed: u64) -> StartPolicy {
    let engine = &args.engine;
    let restarts = RestartPolicy {
        service_failures_max: engine.max_executor_restarts,
        service_window: SERVICE_WINDOW,
        backoff_first: engine.restart_backoff.0,
        backoff_max: engine.restart_backoff_max.0,
        give_up_after: engine.restart_give_up.0,
    };
    StartPolicy { timeouts: start_timeouts(args), restarts, jitter_seed }
}

/// Returns the timeouts for the start of an executor. On a CPU there is no timeout for progress reports,
/// because one forward pass of a large model may take minutes.
fn start_timeouts(args: &ServeArgs) -> StartTimeouts {
    let on_cpu = settings::device(args.engine.device) == DeviceKind::Cpu;
    StartTimeouts {
        hello: HELLO_TIMEOUT,
        stall: (!on_cpu).then_some(STALL_TIMEOUT),
        total: args.engine.startup_timeout.0,
    }
}
