//! Bugs that a build with the feature `planted` can switch on, one at a time.
//!
//! A simulator that finds nothing proves nothing; one that finds each of these does. The choice is
//! a value that travels in the configuration. Without the feature every question below is answered
//! `false` at compile time and the faulty branches vanish.

/// A mistake somebody made in some engine, reproducible on demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// All full blocks of a request become findable with its first row, before their KV is written.
    PublishBeforeCompute,
    /// A block is put on the free list while another table still holds it.
    DoubleFree,
    /// An output of a former epoch of the request is applied.
    StaleEpochAccepted,
    /// Fresh blocks are taken before the prefix hits of the same plan are pinned.
    TakeBeforeClaim,
    /// Growth is computed one position short at a block's edge.
    BlockEdgeOffByOne,
    /// An abort that meets a waiting request is forgotten.
    LostAbort,
    /// A preempted request keeps the token still in flight as a committed one.
    PreemptKeepsInFlight,
    /// A prefix hit may cover the last token, so that nothing is left to forward.
    LastTokenFromCache,
    /// Idle cached blocks of a hit are counted as costing nothing.
    IdleHitsFree,
    /// A block is evicted without a removal event.
    EvictionWithoutEvent,
    /// The epoch of a preempted request does not grow.
    EpochNotBumped,
    /// A request may produce one token more than its limit.
    LengthLimitOffByOne,
    /// Recompute after preemption samples at the end of the prompt instead of the known tokens.
    SampleAtPromptEnd,
    /// A hit is believed on its hash alone: ids, extra keys and guard are not compared.
    GuardIgnored,
    /// A cached block claimed by a hit stays on the eviction list.
    ClaimKeepsLruPlace,
    /// An abort leaves one block of the table held for ever.
    AbortLeaksBlock,
    /// The KV of a failed row becomes findable.
    ErrorRowPublished,
    /// The cache salt is left out of the key of the first block.
    SaltIgnored,
    /// A device loss does not clear the prefix index.
    LossKeepsIndex,
    /// A request is admitted past a blocked head of the queue.
    OvertakesBlockedHead,
    /// A request that was preempted four times stays a victim.
    NeverGuarded,
    /// After a preemption the device is sent table changes only, not the whole table.
    TableNotResent,
    /// A prefill chunk ignores what the rows before it took from the step's budget.
    ChunkOverBudget,
    /// An output of an earlier step, delivered twice, is applied twice.
    RepeatedOutputApplied,
    /// An adopted block is not announced to the device: its table keeps the freed one.
    AdoptionNotSent,
    /// Positions of rejected drafts count as computed.
    RejectedDraftsSettle,
    /// A stop in front of the last token that a row emits is not seen.
    StopAmongDraftsMissed,
    /// A table has no room for what a row writes if the drafts of rows under way are accepted.
    ReserveForgetsSlack,
    /// A row takes drafts up to its request's limit as if those of rows under way were all wrong.
    LimitForgetsSlack,
    /// A row does not say how far behind its start the seat may begin it.
    SlackNotTold,
    /// A row behind two that are under way reads the seat as the first of them left it.
    SeatReadLate,
    /// A rank of a group that has nothing to do gets no batch.
    IdleRankGetsNoBatch,
    /// Each rank of a group pads its experts' rows to its own tokens.
    RankPadsAlone,
    /// A group steps while some of its ranks are not back.
    GroupRunsIncomplete,
    /// The loss of a rank leaves the rest of its group as it was.
    LossSparesPeers,
    /// What the ranks of a lost group were running stays running.
    LossKeepsRunning,
    /// A rank that is lost again before its group is back begins no new generation.
    RelapseKeepsEpoch,
    /// Executors are given up once no sign of life was read for long, though nobody could read while the process was paused.
    PauseIsSilence,
    /// The time in which the process was paused is time of the step that was under way.
    PauseIsStepTime,
    /// A step is given up at the second sign of life that finds it late, though a pause piled them up and they came at once.
    PiledBeatsAreLooks,
    /// A client's name for its request is taken for its id if it is a number.
    NameIsId,
    /// An order by name takes back one of those who share it.
    OrderMissesNamesake,
    /// Prefill of a group is held until all ranks have some, even where nothing else is left to run.
    GateHoldsForever,
}

impl Bug {
    /// Bugs of a replica, for a simulator that walks through them.
    pub const OF_REPLICAS: [Self; 36] = [
        Self::PublishBeforeCompute,
        Self::DoubleFree,
        Self::StaleEpochAccepted,
        Self::TakeBeforeClaim,
        Self::BlockEdgeOffByOne,
        Self::LostAbort,
        Self::PreemptKeepsInFlight,
        Self::LastTokenFromCache,
        Self::IdleHitsFree,
        Self::EvictionWithoutEvent,
        Self::EpochNotBumped,
        Self::LengthLimitOffByOne,
        Self::SampleAtPromptEnd,
        Self::GuardIgnored,
        Self::ClaimKeepsLruPlace,
        Self::AbortLeaksBlock,
        Self::ErrorRowPublished,
        Self::SaltIgnored,
        Self::LossKeepsIndex,
        Self::OvertakesBlockedHead,
        Self::NeverGuarded,
        Self::TableNotResent,
        Self::ChunkOverBudget,
        Self::RepeatedOutputApplied,
        Self::AdoptionNotSent,
        Self::RejectedDraftsSettle,
        Self::StopAmongDraftsMissed,
        Self::ReserveForgetsSlack,
        Self::LimitForgetsSlack,
        Self::SlackNotTold,
        Self::SeatReadLate,
        Self::PauseIsSilence,
        Self::PauseIsStepTime,
        Self::PiledBeatsAreLooks,
        Self::NameIsId,
        Self::OrderMissesNamesake,
    ];

    /// Bugs of ranks that step together, which only a world of groups can show.
    pub const OF_GROUPS: [Self; 7] = [
        Self::IdleRankGetsNoBatch,
        Self::RankPadsAlone,
        Self::GroupRunsIncomplete,
        Self::LossSparesPeers,
        Self::LossKeepsRunning,
        Self::RelapseKeepsEpoch,
        Self::GateHoldsForever,
    ];
}

/// The bug in force: none, unless the feature `planted` is on and one was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Planted {
    #[cfg(feature = "planted")]
    bug: Option<Bug>,
}

impl Planted {
    /// A build in which `bug` is in force.
    #[cfg(feature = "planted")]
    pub fn bug(bug: Bug) -> Self {
        Self { bug: Some(bug) }
    }

    /// Whether `bug` is in force.
    #[inline]
    #[must_use]
    pub fn has(self, bug: Bug) -> bool {
        #[cfg(feature = "planted")]
        return self.bug == Some(bug);
        #[cfg(not(feature = "planted"))]
        {
            let _ = bug;
            false
        }
    }
}
