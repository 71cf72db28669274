//! Classes of failed executor restarts, as named in metrics, health probes and logs.

/// Class of a failed executor restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestartFailureKind {
    /// The weights or the model folder differ from the weights or the folder of the first start.
    WeightsChanged,
    /// An executor reported an error.
    Fault,
    /// An executor process exited.
    Exited,
    /// The start made no progress, or took too long in total.
    Timeout,
    /// An executor has another build version, protocol version, epoch (generation of the executor group) or
    /// rank than expected.
    Mismatch,
    /// The operating system provided no process, thread or file descriptor.
    System,
}

impl RestartFailureKind {
    /// All classes, in the order of their discriminants.
    pub const ALL: [Self; 6] = [
        Self::WeightsChanged,
        Self::Fault,
        Self::Exited,
        Self::Timeout,
        Self::Mismatch,
        Self::System,
    ];

    /// Name of the class in metrics, health probes and logs.
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
