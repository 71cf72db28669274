//! When what happened to one request: kept with its route, read once at its end.

use protocol::Replica;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Choices of one prompt: figures that vLLM observes once for all of them.
#[derive(Debug)]
pub(super) struct PromptChoices {
    pub(super) n: u32,
    /// Choices that have not ended.
    choices_left: AtomicU32,
    /// Most tokens that one of them produced.
    most_tokens: AtomicU32,
}

impl PromptChoices {
    fn new(n: u32) -> Self {
        Self { n, choices_left: AtomicU32::new(n), most_tokens: AtomicU32::new(0) }
    }

    /// A choice ended with so many tokens; the most of all of them once it was the last.
    pub(super) fn ended(&self, tokens: u32) -> Option<u32> {
        self.most_tokens.fetch_max(tokens, Ordering::AcqRel);
        let last = self.choices_left.fetch_sub(1, Ordering::AcqRel) == 1;
        last.then(|| self.most_tokens.load(Ordering::Acquire))
    }
}

/// The times and counts of one request.
#[derive(Debug)]
pub struct RequestTimes {
    /// When the server had its body.
    pub(super) arrived: Instant,
    /// The replica that ran it first; the first one for as long as none has.
    pub(super) replica: Replica,
    /// When it was handed to the engine.
    pub(super) submitted: Instant,
    /// How long it then waited for a seat; `None` = it never had one.
    pub(super) queued: Option<Duration>,
    /// First and last token.
    pub(super) tokens_at: Option<(Instant, Instant)>,
    pub(super) prompt_tokens: u32,
    pub(super) cached_tokens: u32,
    pub(super) max_tokens: u32,
    pub(super) generated: u32,
    pub(super) preemptions: u32,
    pub(super) choices: Arc<PromptChoices>,
}

impl RequestTimes {
    /// The times of `n` choices of one prompt of `prompt_tokens`, handed to the engine now.
    pub fn of_choices(
        n: u32,
        arrived: Instant,
        prompt_tokens: u32,
        max_tokens: u32,
    ) -> impl Iterator<Item = Self> {
        let (siblings, submitted) = (Arc::new(PromptChoices::new(n)), Instant::now());
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
            choices: Arc::clone(&siblings),
        })
    }

    /// When it got a seat.
    pub(super) fn scheduled(&self) -> Option<Instant> {
        self.queued.map(|queued| self.submitted + queued)
    }
}
