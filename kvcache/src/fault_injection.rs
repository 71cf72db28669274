//! Bugs that a build with the feature `planted` can switch on, one at a time.
//!
//! A simulator that finds nothing proves nothing; one that finds each of these does. The choice is
//! a value that travels in the configuration. Without the feature every question below is answered
//! `false` at compile time and the faulty branches vanish.

/// A mistake somebody made in some engine, reproducible on demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InjectedFault {
    /// All full blocks of a request become findable with its first row, before their KV is written.
    PublishBeforeCompute,
    /// A block is put on the free list while another table still holds it.
    DoubleFree,
    /// An output of a former epoch of the request is applied.
    StaleEpochAccepted,
    /// Fresh blocks are taken before the prefix hits of the same plan are pinned.
    AllocateBeforePin,
    /// Growth is computed one position short at a block's edge.
    BlockEdgeOffByOne,
    /// An abort that meets a waiting request is forgotten.
    AbortDropped,
    /// A preempted request keeps the token still in flight as a committed one.
    PreemptKeepsInFlight,
    /// A prefix hit may cover the last token, so that nothing is left to forward.
    LastTokenFromCache,
    /// Idle cached blocks of a hit are counted as costing nothing.
    EvictableHitsCostNothing,
    /// A block is evicted without a removal event.
    EvictionWithoutEvent,
    /// The epoch of a preempted request does not grow.
    EpochNotBumped,
    /// A request may produce one token more than its limit.
    LengthLimitOffByOne,
    /// Recompute after preemption samples at the end of the prompt instead of the known tokens.
    SampleAtPromptEnd,
    /// A hit is believed on its hash alone: ids, extra keys and guard are not compared.
    HashGuardIgnored,
    /// A cached block claimed by a hit stays on the eviction list.
    PinKeepsLruEntry,
    /// An abort leaves one block of the table held for ever.
    AbortLeaksBlock,
    /// The KV of a failed row becomes findable.
    ErrorRowPublished,
    /// The cache salt is left out of the key of the first block.
    SaltIgnored,
    /// A device loss does not clear the prefix index.
    FailureKeepsIndex,
    /// A request is admitted past a blocked head of the queue.
    AdmitsPastBlockedHead,
    /// A request that was preempted four times stays a victim.
    NeverNonPreemptible,
    /// After a preemption the device is sent table changes only, not the whole table.
    BlockTableNotResent,
    /// A prefill chunk ignores what the rows before it took from the step's budget.
    ChunkOverBudget,
    /// An output of an earlier step, delivered twice, is applied twice.
    RepeatedOutputApplied,
    /// An adopted block is not announced to the device: its table keeps the freed one.
    DeduplicationNotSent,
    /// Positions of rejected drafts count as computed.
    RejectedDraftsCommitted,
    /// A stop in front of the last token that a row emits is not seen.
    StopInsideDraftsMissed,
    /// A table has no room for what a row writes if the drafts of rows under way are accepted.
    ReserveIgnoresDraftSlack,
    /// A row takes drafts up to its request's limit as if those of rows under way were all wrong.
    LimitIgnoresDraftSlack,
    /// A row does not say how far behind its start the seat may begin it.
    DraftSlackNotSent,
    /// A row behind two that are under way reads the seat as the first of them left it.
    StaleSequenceSlotRead,
    /// A rank of a group that has nothing to do gets no batch.
    IdleRankGetsNoBatch,
    /// Each rank of a group pads its experts' rows to its own tokens.
    RankPadsIndependently,
    /// A group steps while some of its ranks are not back.
    IncompleteGroupSteps,
    /// The loss of a rank leaves the rest of its group as it was.
    FailureSparesPeers,
    /// What the ranks of a lost group were running stays running.
    FailureKeepsRunning,
    /// A rank that is lost again before its group is back begins no new generation.
    RepeatedFailureKeepsEpoch,
    /// Executors are given up once no sign of life was read for long, though nobody could read while the process was paused.
    PauseCountsAsHeartbeatTimeout,
    /// The time in which the process was paused is time of the step that was under way.
    PauseCountsAsStepTime,
    /// A step is given up at the second sign of life that finds it late, though a pause piled them up and they came at once.
    QueuedHeartbeatsCountTwice,
    /// A client's name for its request is taken for its id if it is a number.
    ClientIdUsedAsRequestId,
    /// An order by name takes back one of those who share it.
    AbortByNameMissesDuplicate,
    /// Prefill of a group is held until all ranks have some, even where nothing else is left to run.
    PrefillGateHoldsForever,
}

impl InjectedFault {
    /// Bugs of a replica, for a simulator that walks through them.
    pub const REPLICA_FAULTS: [Self; 36] = [
        Self::PublishBeforeCompute,
        Self::DoubleFree,
        Self::StaleEpochAccepted,
        Self::AllocateBeforePin,
        Self::BlockEdgeOffByOne,
        Self::AbortDropped,
        Self::PreemptKeepsInFlight,
        Self::LastTokenFromCache,
        Self::EvictableHitsCostNothing,
        Self::EvictionWithoutEvent,
        Self::EpochNotBumped,
        Self::LengthLimitOffByOne,
        Self::SampleAtPromptEnd,
        Self::HashGuardIgnored,
        Self::PinKeepsLruEntry,
        Self::AbortLeaksBlock,
        Self::ErrorRowPublished,
        Self::SaltIgnored,
        Self::FailureKeepsIndex,
        Self::AdmitsPastBlockedHead,
        Self::NeverNonPreemptible,
        Self::BlockTableNotResent,
        Self::ChunkOverBudget,
        Self::RepeatedOutputApplied,
        Self::DeduplicationNotSent,
        Self::RejectedDraftsCommitted,
        Self::StopInsideDraftsMissed,
        Self::ReserveIgnoresDraftSlack,
        Self::LimitIgnoresDraftSlack,
        Self::DraftSlackNotSent,
        Self::StaleSequenceSlotRead,
        Self::PauseCountsAsHeartbeatTimeout,
        Self::PauseCountsAsStepTime,
        Self::QueuedHeartbeatsCountTwice,
        Self::ClientIdUsedAsRequestId,
        Self::AbortByNameMissesDuplicate,
    ];

    /// Bugs of ranks that step together, which only a world of groups can show.
    pub const GROUP_FAULTS: [Self; 7] = [
        Self::IdleRankGetsNoBatch,
        Self::RankPadsIndependently,
        Self::IncompleteGroupSteps,
        Self::FailureSparesPeers,
        Self::FailureKeepsRunning,
        Self::RepeatedFailureKeepsEpoch,
        Self::PrefillGateHoldsForever,
    ];
}

/// The bug in force: none, unless the feature `planted` is on and one was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FaultInjection {
    #[cfg(feature = "planted")]
    fault: Option<InjectedFault>,
}

impl FaultInjection {
    /// A build in which `bug` is in force.
    #[cfg(feature = "planted")]
    pub fn with_fault(bug: InjectedFault) -> Self {
        Self { fault: Some(bug) }
    }

    /// Whether `bug` is in force.
    #[inline]
    #[must_use]
    pub fn is_active(self, bug: InjectedFault) -> bool {
        #[cfg(feature = "planted")]
        return self.fault == Some(bug);
        #[cfg(not(feature = "planted"))]
        {
            let _ = bug;
            false
        }
    }
}
