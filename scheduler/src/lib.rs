//! Scheduler: plans the batch rows, block allocations, admissions and preemptions of every replica's next
//! step.
//!
//! `Scheduler::tick(now, inbox) -> effects` is the entry point. No I/O, clock, thread, random number or
//! hash-map order affects a decision, so the same inbox always gives the same effects. The crate also
//! contains three rules that the server and the simulator share: step deadlines (`StepWatchdog`), heartbeat
//! timeouts (`HeartbeatMonitor`) and request ids (`assign_request_ids`).

#![forbid(unsafe_code)]

mod admission_control;
mod apply;
mod cold_fields;
mod commit;
mod config;
mod event;
mod heartbeat_monitor;
mod kv_group_hits;
mod limits;
mod lockstep;
mod mask_state;
mod plan;
mod publish;
mod replica_router;
mod replica_state;
mod request;
mod request_ids;
mod request_index;
mod request_queue;
mod scheduler;
mod scheduling_state;
mod slab;
mod stats;
mod step_costs;
mod step_deadline;
mod step_watchdog;
mod submit;
mod tick_timer;
mod token_event;

pub use config::{RoutingPolicy, SchedulerConfig, SchedulerConfigError};
pub use event::{ControlCommand, ExecutorFailure, SchedulerEffect, SchedulerEvent};
pub use heartbeat_monitor::{HEARTBEAT_GRACE_PERIOD, HEARTBEAT_TIMEOUT, HeartbeatMonitor};
pub use kv_group_hits::KvGroupHitStats;
pub use kvcache::{
    BlockKey, BlockLifetime, ExtraKeys, KvConfig, KvConfigError, LifetimeSampleRate, PromptHasher,
};
pub use limits::SchedulerLimits;
pub use request_ids::{assign_request_ids, request_ids_by_client_id};
pub use scheduler::Scheduler;
pub use stats::{
    BlockStats, DRAFT_TOKENS_MAX, ExecutorFailureCounts, RecomputedTokenCounts, SchedulerStats,
    SpecDecodeStats, StateSlotStats,
};
pub use step_costs::StepCosts;
pub use step_deadline::{StepDeadlineEstimator, StepWorkload};
pub use step_watchdog::{StepTimeout, StepWatchdog, StragglerReport};
pub use submit::{RejectReason, RequestSubmission};
pub use tick_timer::{TickPhase, TickTimer};
pub use token_event::{
    AbortCause, FinishReason, FirstAdmission, RequestError, StopReason, TokenEvent,
    VerifiedDraftCounts,
};
