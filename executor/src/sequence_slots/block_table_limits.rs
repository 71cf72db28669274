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
}

impl BlockTableLimits {
    /// Returns the limits of each group of `spec` that has blocks, for requests of up to `longest` tokens of which up to
    /// `in_flight` are in flight.
    pub(crate) fn of_groups(spec: &KvSpec, longest: u32, in_flight: u32) -> Vec<Self> {
        let of_group = |group: &KvGroup| Self {
            kind: group.kind,
            width: longest.div_ceil(spec.block_tokens) as usize,
            update_entries: group.kind.blocks_of_request(longest, in_flight, spec.block_tokens)
                as usize,
        };
        spec.groups.iter().filter(|group| !group.kind.is_state()).map(of_group).collect()
    }
}
