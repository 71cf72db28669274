//! State slots of one request: the slots that its rows write, and the slots that rows in flight read.

use protocol::StateSlot;

/// State slots of a request in all state groups. Every value that is not empty must be released with
/// `StateCache::free`.
///
/// A row reads the state before its first position and writes the state after its last one. Usually both are in
/// the live slot. A row that must not overwrite the state before it writes another slot; the slot that it reads is a
/// source until the output of the row has been applied.
#[derive(Debug, Default)]
pub struct StateSlots {
    /// The slot of each group that rows write; empty = the request holds no slots.
    pub(crate) live: Vec<StateSlot>,
    /// A second slot of each group for rows that may have to be repeated; empty = none, or it is in use.
    pub(crate) spare: Vec<StateSlot>,
    /// Slots with the state before rows in flight or before the next row, in order of positions.
    pub(crate) sources: Vec<StateSource>,
}

/// Slots with the state before a position, which the row at this position reads.
#[derive(Debug)]
pub(crate) struct StateSource {
    /// The slot of each group.
    pub(crate) slots: Vec<StateSlot>,
    /// Number of tokens that are part of the state.
    pub(crate) position: u32,
    pub(crate) purpose: SourcePurpose,
}

/// Why a state is kept until the row that reads it has been applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SourcePurpose {
    /// It becomes a checkpoint as soon as the row that writes it has been applied.
    PendingCheckpoint,
    /// It is a checkpoint, or was one when the reference was added.
    Checkpoint,
    /// The row that reads it may have to be repeated.
    Repeat,
}

/// What the next row of a request requires of its state slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateRow {
    /// First position of the row.
    pub start: u32,
    /// Whether the state before the row is to become a checkpoint.
    pub checkpoint: bool,
    /// Whether the row may have to be repeated, so that the state before it must not be overwritten.
    pub may_repeat: bool,
}

impl StateSlots {
    /// Returns whether the request holds no slots.
    pub fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    /// Returns whether the state before `position` is to become a checkpoint and the row that wrote it has not been
    /// applied, or the next row at `position` reads it.
    pub fn has_pending_checkpoint(&self, position: u32) -> bool {
        let pending = SourcePurpose::PendingCheckpoint;
        self.sources.last().is_some_and(|s| s.position == position && s.purpose == pending)
    }

    /// Iterates over all slots of a group that the request references.
    pub(crate) fn of_group(&self, group: usize) -> impl Iterator<Item = StateSlot> {
        let sources = self.sources.iter().map(|source| &source.slots);
        let all = [&self.live, &self.spare].into_iter().chain(sources);
        all.filter_map(move |slots| slots.get(group).copied())
    }
}
