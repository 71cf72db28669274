//! From the command line to how executors are started, and started again.

use super::settings;
use crate::config::ServeArgs;
use engine::{RestartPolicy, StartPolicy, StartTimeouts};
use protocol::DeviceKind;
use std::time::Duration;

/// Until an executor has said who it is.
const HELLO_WAIT: Duration = Duration::from_secs(30);
/// Without progress of a start on a GPU.
const STALL_WAIT: Duration = Duration::from_mins(1);
/// How long a failure of executors in service counts.
const SERVICE_WINDOW: Duration = Duration::from_mins(10);

/// How executors are started, and when those that fail are started again. `jitter_seed` varies the pauses.
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

/// How long a start may take. One pass of a large model may take a CPU minutes.
fn start_timeouts(args: &ServeArgs) -> StartTimeouts {
    let on_cpu = settings::device(args.engine.device) == DeviceKind::Cpu;
    StartTimeouts {
        hello: HELLO_WAIT,
        stall: (!on_cpu).then_some(STALL_WAIT),
        total: args.engine.startup_timeout.0,
    }
}
