//! Phases of a tick, for callers that measure phase times: the scheduler itself reads no clock.

/// A phase of a tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TickPhase {
    /// Applying outputs, submissions and aborts.
    Apply,
    /// Planning a step.
    Plan,
    /// Executing the plan and writing the batch.
    Commit,
}

/// Timer that is called at the end of each phase of a tick. A phase starts when the previous one ends.
pub trait TickTimer {
    /// Called at the end of a phase.
    fn phase_done(&mut self, phase: TickPhase);
}

/// A timer that ignores all calls.
impl TickTimer for () {
    fn phase_done(&mut self, _: TickPhase) {}
}
