//! Engine: runs the scheduler thread of a server and supervises the executors.
//!
//! - [`EngineClient`] is the client side: submission, event streams, admission control. [`RunningEngine`]
//!   runs the engine for it: the scheduler thread (`engine_loop.rs`) reads its inbox, calls the scheduler
//!   and sends batches.
//! - [`ExecutorManager`] starts the executors of all replicas, as a thread, as processes or on other nodes
//!   ([`nodes`]), and restarts failed ones. [`ExecutorStartupParams`] waits until started executors are
//!   ready.
//! - [`supervise`] runs on the main thread: it waits for the end of the server and restarts failed
//!   executors.
//!
//! Handles token ids only: no text and no HTTP. Reads neither command-line flags nor environment variables.

#![forbid(unsafe_code)]

mod client;
#[cfg(test)]
#[path = "../../tests/support/deadlines.rs"]
mod deadlines;
mod engine_loop;
mod executors;
mod health;
mod heartbeat_timeout;
pub mod nodes;
mod replica_handle;
mod running_engine;
mod startup;
mod step_clock;
mod supervisor;

pub use client::{
    AdmissionController, AdmissionLimits, AdmissionPermit, BulkInbox, DeferredRequests,
    EngineClient, EngineMessage, ExecutorId, IndexedTokenEvent, OverloadRejection,
    PrefixIndexSnapshot, QueuedBytesPermit, RequestEventStream,
};
pub use engine_loop::{ExecutorRestartFailure, SupervisorEvent};
pub use executors::{
    ExecutorLaunchOptions, ExecutorLink, ExecutorManager, ExecutorProcessHandle, ExecutorProgram,
    ExecutorReceiver, RemoteNodes, RestartPolicy, StartPolicy,
};
pub use health::{HealthMonitor, ServerStatus};
pub use running_engine::{EngineTelemetry, RunningEngine, SchedulerWithKvEvents};
pub use startup::{
    ExecutorStartupParams, ExpectedHello, StartError, StartTimeouts, StartupReport,
    WeightsDigestBaseline,
};
pub use supervisor::{ServiceEndReason, SupervisorState, supervise};
