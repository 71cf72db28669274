//! Why executors that were started again did not become ready, as figures, probes and the log name it.

/// A class of failed restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartFailure {
    /// The weights or the model folder are not those of the first start.
    WeightsChanged,
    /// An executor reported an error.
    Fault,
    /// An executor process ended.
    Exited,
    /// There was no progress, or the whole start took too long.
    Timeout,
    /// An executor of another build, epoch or rank.
    Mismatch,
    /// The system gave no process, thread or descriptor.
    System,
}

impl StartFailure {
    /// All classes, in the order of their numbers.
    pub const ALL: [Self; 6] = [
        Self::WeightsChanged,
        Self::Fault,
        Self::Exited,
        Self::Timeout,
        Self::Mismatch,
        Self::System,
    ];

    /// The name in metrics, probes and the log.
    pub const fn name(self) -> &'static str {
        match self {
            Self::WeightsChanged => "weights_changed",
            Self::Fault => "fault",
            Self::Exited => "exited",
            Self::Timeout => "timeout",
            Self::Mismatch => "mismatch",
            Self::System => "system",
        }
    }
}
