//! Decides the next step of every replica.
//!
//! `Engine::tick(now, inbox) -> effects` is the whole surface: no I/O, clock, thread, randomness or
//! hash-map order takes part in a decision, so a recorded inbox replays to the same effects. Beside it stand three rules
//! that whoever drives it follows, a server and the simulator alike: when a step is late (`UnderWay`), when silence is a loss
//! (`Silence`), and which ids requests get (`Enrolment`).

#![forbid(unsafe_code)]

mod apply;
mod cold;
mod commit;
mod config;
mod domain;
mod engine;
mod enrol;
mod event;
mod laps;
mod limits;
mod line;
mod lockstep;
mod masking;
mod owners;
mod place;
mod plan;
mod publish;
mod queue;
mod request;
mod silence;
mod slab;
mod state;
mod stats;
mod step_deadline;
mod submit;
mod token_event;
mod under_way;

pub use config::{EngineConfig, EngineError, Routing};
pub use engine::Engine;
pub use enrol::Enrolment;
pub use event::{Control, Effect, Event, Loss};
pub use kvcache::{
    BlockKey, Bug, ExtraKeys, KvConfig, KvError, Planted, PromptHasher, Share, Stay,
};
pub use laps::{Laps, Part};
pub use limits::Limits;
pub use silence::{SECOND_LOOK, SILENCE, Silence};
pub use stats::{BlockStats, ByLoss, DRAFTS_MAX, Drafted, Recomputed, StepStats};
pub use step_deadline::{StepDeadline, Work};
pub use submit::{Refusal, Submit};
pub use token_event::{AbortCause, ErrorCode, Finish, FirstRun, StopReason, TokenEvent};
pub use under_way::{Lateness, Overdue, UnderWay};
