//! Drives the scheduler of a server and its executors.
//!
//! - [`EngineClient`] is the server's side: submits, event streams, admission. [`EngineHost`] puts an engine behind it:
//!   the scheduler's thread (`engine_loop.rs`) drains its inbox, ticks and sends batches.
//! - [`ExecutorWorld`] starts the executors of all replicas, as a thread, as processes or on other nodes ([`nodes`]), and
//!   starts failed ones again. [`ExecutorStartup`] is the time until they are ready.
//! - [`supervise`] runs on the main thread: it waits for whatever ends the server, and has lost executors replaced.
//!
//! Knows token ids only: no text and no HTTP. Reads neither flags nor variables.

#![forbid(unsafe_code)]

mod client;
mod engine_host;
mod engine_loop;
mod executors;
mod health;
mod heartbeat_timeout;
pub mod nodes;
mod replica_handle;
mod startup;
mod step_clock;
mod supervisor;

pub use client::{
    AdmissionController, AdmissionLimits, AdmissionPermit, BatchInbox, CachedBlocks,
    DeferredSubmit, EngineClient, EngineMessage, ExecutorId, OverloadRejection, QueuedBytes,
    RequestEventStream,
};
pub use engine_host::{EngineHost, EngineObservers, EngineParts};
pub use engine_loop::{StartFailureReport, SupervisorEvent};
pub use executors::{
    ExecutorLaunchOptions, ExecutorLink, ExecutorProcessHandle, ExecutorProgram, ExecutorReceiver,
    ExecutorWorld, RemoteNodes, RestartPolicy, StartPolicy,
};
pub use health::{HealthState, ServerStatus};
pub use startup::{
    ExecutorStartup, ExpectedExecutors, StartError, StartTimeouts, StartupReport, WeightsBaseline,
};
pub use supervisor::{ServiceEnd, SupervisorState, supervise};
