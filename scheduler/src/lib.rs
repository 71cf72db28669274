//! Decides the next step of every replica.
//!
//! `Engine::tick(now, inbox) -> effects` is the whole surface: no I/O, clock, thread, randomness or
//! hash-map order takes part in a decision, so a recorded inbox replays to the same effects.

#![forbid(unsafe_code)]

mod apply;
mod cold;
mod commit;
mod config;
mod domain;
mod engine;
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
mod slab;
mod state;
mod stats;
mod submit;
mod token_event;

pub use config::{EngineConfig, EngineError, Routing};
pub use engine::Engine;
pub use event::{Control, Effect, Event, Loss};
pub use kvcache::{
    BlockKey, Bug, ExtraKeys, KvConfig, KvError, Planted, PromptHasher, Share, Stay,
};
pub use laps::{Laps, Part};
pub use limits::Limits;
pub use stats::{BlockStats, ByLoss, DRAFTS_MAX, Drafted, Recomputed, StepStats};
pub use submit::{Refusal, Submit};
pub use token_event::{AbortCause, ErrorCode, Finish, FirstRun, StopReason, TokenEvent};
