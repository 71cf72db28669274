//! Timestamps and counts of one request, kept until its end for the request metrics.

use protocol::Replica;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Counts shared by the choices (`n`) of one prompt, for metrics that vLLM observes once per prompt.
#[derive(Debug)]
pub(super) struct PromptChoiceCounts {
    pub(super) n: u32,
    /// Number of choices that have not finished.
    choices_left: AtomicU32,
    /// Largest number of tokens that a choice generated.
    max_generation_tokens: AtomicU32,
}

impl PromptChoiceCounts {
    fn new(n: u32) -> Self {
        Self { n, choices_left: AtomicU32::new(n), max_generation_tokens: AtomicU32::new(0) }
    }

    /// Records that a choice ended with `tokens` tokens. After the last choice, returns the largest number of
    /// tokens of all choices.
    pub(super) fn ended(&self, tokens: u32) -> Option<u32> {
        self.max_generation_tokens.fetch_max(tokens, Ordering::AcqRel);
        let last = self.choices_left.fetch_sub(1, Ordering::AcqRel) == 1;
        last.then(|| self.max_generation_tokens.load(Ordering::Acquire))
    }
}

/// Timestamps and counts of one request.
#[derive(Debug)]
pub struct RequestTimes {
    /// Time at which the request body was complete.
    pub(super) arrived: Instant,
    /// First replica that ran the request; replica 0 until then.
    pub(super) replica: Replica,
    /// Time of submission to the engine.
    pub(super) submitted: Instant,
    /// Queue time until the request was first scheduled; `None` = never scheduled.
    pub(super) queued: Option<Duration>,
    /// Times at which the first and the last token were delivered.
    pub(super) tokens_at: Option<(Instant, Instant)>,
    pub(super) prompt_tokens: u32,
    pub(super) cached_tokens: u32,
    pub(super) max_tokens: u32,
    pub(super) generated: u32,
    pub(super) preemptions: u32,
    pub(super) choices: Arc<PromptChoiceCounts>,
}

impl RequestTimes {
    /// Creates the `RequestTimes` of the `n` choices of a prompt with `prompt_tokens` tokens, submitted to
    /// the engine now.
    pub fn of_choices(
        n: u32,
        arrived: Instant,
        prompt_tokens: u32,
        max_tokens: u32,
    ) -> impl Iterator<Item = Self> {
        let (choices, submitted) = (Arc::new(PromptChoiceCounts::new(n)), Instant::now());
        (0..n).map(move |_| Self {
            arrived,
            replica: Replica(0),
            submitted,
            queued: None,
            tokens_at: None,
            prompt_tokens,
            cached_tokens: 0,
            max_tokens,
            generated: 0,
            preemptions: 0,
            choices: Arc::clone(&choices),
        })
    }

    /// Time at which the request was first scheduled.
    pub(super) fn scheduled(&self) -> Option<Instant> {
        self.queued.map(|queued| self.submitted + queued)
    }
}
