//! Limits of the block tables of a KV group.

use protocol::{KvGroup, KvKind, KvSpec};

/// Limits of the block tables of one KV group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockTableLimits {
    /// Kind of the group.
    pub(crate) kind: KvKind,
    /// Maximum number of entries in a table.
    pub(crate) width: usize,
    /// Maximum number of entries that one row replaces: as many blocks as a request holds at a time. A window
    /// limits this number, so that the staging buffer need not have space for whole tables of all rows.
    pub(crate) update_entries: usize,
    /// Distance between the ids of successive blocks in the tables on the device (`KvPoolLayout::block_id_step`).
    pub(crate) block_id_step: usize,
}

impl BlockTableLimits {
    /// Returns the limits of each group of `spec` that has blocks, for requests of up to `longest` tokens of which up to
    /// `in_flight` are in flight. `block_id_step` returns the distance between the ids of successive blocks in a group.
    pub(crate) fn of_groups(
        spec: &KvSpec,
        longest: u32,
        in_flight: u32,
        block_id_step: impl Fn(usize) -> usize,
    ) -> Vec<Self> {
        let of_group = |(index, group): (usize, &KvGroup)| Self {
            kind: group.kind,
            width: longest.div_ceil(spec.block_tokens) as usize,
            update_entries: group.kind.blocks_of_request(longest, in_flight, spec.block_tokens)
                as usize,
            block_id_step: block_id_step(index),
        };
        let groups = spec.groups.iter().filter(|group| !group.kind.is_state());
        groups.enumerate().map(of_group).collect()
    }
}
