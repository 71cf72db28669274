//! The engine: `tick(now, inbox) -> effects`.

use crate::{Effect, EngineConfig, EngineError, Event, PromptHasher};
use protocol::{Epoch, Replica};

/// Schedules every replica and owns every KV block.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
}

impl Engine {
    /// An idle engine.
    ///
    /// Errors: a limit out of range, or a pool that cannot hold one request of `max_model_len`.
    pub fn new(config: EngineConfig) -> Result<Self, EngineError> {
        Ok(Self { config })
    }

    /// The function submitters compute `Submit::keys` with.
    pub fn hasher(&self) -> PromptHasher {
        PromptHasher::new(self.config.kv.hasher(), self.config.kv.caching)
    }

    /// Generation of a replica's executor group.
    pub fn epoch(&self, _replica: Replica) -> Epoch {
        Epoch(0)
    }

    /// Takes everything out of `inbox`, decides, and appends what is to be done to `effects`.
    ///
    /// `now_ms` only measures queueing and losses; it decides no plan.
    pub fn tick(&mut self, now_ms: u64, inbox: &mut Vec<Event>, effects: &mut Vec<Effect>) {
        let _ = (now_ms, effects);
        inbox.clear();
    }

    /// Whether no request is live and no step is in flight.
    pub fn is_idle(&self) -> bool {
        true
    }

    /// Recomputes every counter and reference from its owners; panics if one is wrong.
    pub fn check(&self) {}
}
