//! The parts of a tick, for whoever times them: the scheduler itself reads no clock.

/// A part of a tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TickPhase {
    /// Taking in answers, submits and aborts.
    Apply,
    /// Deciding what a step runs.
    Plan,
    /// Carrying the plan out and writing the batch.
    Commit,
}

/// Hears the end of each part: what has passed since the end of the former one belongs to it.
pub trait TickTimer {
    /// A part is over.
    fn phase_done(&mut self, part: TickPhase);
}

/// Times nothing.
impl TickTimer for () {
    fn phase_done(&mut self, _: TickPhase) {}
}
