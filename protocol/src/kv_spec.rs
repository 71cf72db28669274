//! Layout of a model's KV cache. The scheduler computes block counts from it; a new kind of attention adds a
//! `KvKind`.

use serde::{Deserialize, Serialize};

/// KV cache layout of a model, as far as the scheduler needs it.
///
/// All groups share one pool of blocks: a block stores `block_tokens` positions of the layers of whichever
/// group it is allocated to. Groups that keep all positions precede window groups, and state groups, which have no
/// blocks, follow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSpec {
    /// Token positions per block.
    pub block_tokens: u32,
    /// Groups of layers; the layers of a group share one block table.
    pub groups: Vec<KvGroup>,
}

/// Layers that share one block table, or in a state group one state slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvGroup {
    /// Layer indices.
    pub layers: Vec<u16>,
    /// Kind of state that is stored per token, such as keys and values.
    pub kind: KvKind,
    /// Bytes that the layers of the group store in one block, on one rank; 0 in a state group.
    pub bytes_per_block: u64,
}

/// Kind of state that a KV group stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvKind {
    /// Keys and values of every position.
    Full,
    /// MLA: compressed KV of every position.
    #[serde(rename = "Latent")]
    Mla,
    /// Sliding window: keys and values of the last `tokens` positions. A query attends to the key of its own
    /// position and to the `tokens - 1` keys before it; earlier keys are never read again.
    Window {
        /// Number of keys to which a query attends.
        tokens: u32,
    },
    /// Recurrent state, such as that of gated delta net: the layers fold all earlier positions into a state of
    /// constant size, which is stored in a state slot. A request resumes from the copy of a state at the end of its
    /// prefix hit, which it reads once while it writes another slot (fork).
    State {
        /// Number of state slots that the rows of a request write: 1.
        slots_per_request: u16,
        /// Bytes that the layers of the group store in one state slot, on one rank.
        bytes_per_slot: u64,
    },
}

impl KvKind {
    /// Returns the name of the kind in metrics and replies, after the names of vLLM's KV cache specs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full_attention",
            Self::Mla => "mla_attention",
            Self::Window { .. } => "sliding_window",
            Self::State { .. } => "recurrent_state",
        }
    }

    /// Returns whether the group keeps the entries of all positions.
    pub const fn keeps_all_positions(self) -> bool {
        matches!(self, Self::Full | Self::Mla)
    }

    /// Returns whether the group stores recurrent state in state slots, and nothing in blocks.
    pub const fn is_state(self) -> bool {
        matches!(self, Self::State { .. })
    }

    /// Returns the window of the group; `None` if it has no window.
    pub const fn window(self) -> Option<u32> {
        match self {
            Self::Full | Self::Mla | Self::State { .. } => None,
            Self::Window { tokens } => Some(tokens),
        }
    }

    /// Returns the lowest position that the query at `position` reads from blocks; the next position if it reads
    /// none.
    pub const fn first_read(self, position: u32) -> u32 {
        match self {
            Self::Full | Self::Mla => 0,
            Self::State { .. } => position.saturating_add(1),
            Self::Window { tokens } => position.saturating_add(1).saturating_sub(tokens),
        }
    }

    /// Returns the largest number of blocks that a request of `len` tokens holds at a time in a group of this
    /// kind, if at most `in_flight` of its tokens are in flight, that is, in steps whose outputs have not been
    /// applied.
    pub fn blocks_of_request(self, len: u32, in_flight: u32, block_tokens: u32) -> u32 {
        if self.is_state() {
            return 0;
        }
        let all = len.div_ceil(block_tokens);
        self.window().map_or(all, |window| {
            // One block more at each end: a row may begin within a block, and blocks before the window are freed
            // only when a row crosses a block boundary.
            let positions = (window - 1).saturating_add(in_flight);
            all.min(positions.div_ceil(block_tokens) + 2)
        })
    }
}

impl KvSpec {
    /// Returns the bytes of one block of the pool, on one rank: those of the group that stores most.
    pub fn bytes_per_block(&self) -> u64 {
        self.groups.iter().map(|g| g.bytes_per_block).max().unwrap_or(0)
    }

    /// Returns whether a group of the model stores recurrent state.
    pub fn has_state(&self) -> bool {
        self.groups.iter().any(|group| group.kind.is_state())
    }

    /// Returns the bytes of one state slot in all state groups, on one rank.
    pub fn bytes_per_state_slot(&self) -> u64 {
        let bytes = |group: &KvGroup| match group.kind {
            KvKind::State { bytes_per_slot, .. } => bytes_per_slot,
            KvKind::Full | KvKind::Mla | KvKind::Window { .. } => 0,
        };
        self.groups.iter().map(bytes).sum()
    }

    /// Returns the number of state slots of each state group that a replica allocates for `max_num_seqs` running
    /// requests: one for each request, and further ones for checkpoints of prefixes and for rows that may have to be
    /// repeated. 0 without state groups.
    pub fn state_slots(&self, max_num_seqs: u32) -> u32 {
        const FURTHER_SLOTS_MIN: u32 = 4;
        if !self.has_state() {
            return 0;
        }
        max_num_seqs.saturating_add((max_num_seqs / 4).max(FURTHER_SLOTS_MIN))
    }

    /// Returns the largest number of blocks that a request of `len` tokens holds in all groups at a time, if
    /// at most `in_flight` of its tokens are in flight.
    pub fn blocks_of_request(&self, len: u32, in_flight: u32) -> u32 {
        let kinds = self.groups.iter().map(|group| group.kind);
        let blocks = kinds.map(|kind| kind.blocks_of_request(len, in_flight, self.block_tokens));
        blocks.fold(0, u32::saturating_add)
    }

    /// Returns the length of the longest request that a pool of `blocks` blocks can hold, if at most `in_flight`
    /// of its tokens are in flight.
    pub fn longest_request(&self, blocks: u32, in_flight: u32) -> u32 {
        let fits = |len: u32| self.blocks_of_request(len, in_flight) <= blocks;
        let most = u64::from(blocks) * u64::from(self.block_tokens);
        let (mut fitting, mut above) = (0, u32::try_from(most).unwrap_or(u32::MAX - 1) + 1);
        while above - fitting > 1 {
            let middle = fitting + (above - fitting) / 2;
            if fits(middle) {
                fitting = middle;
            } else {
                above = middle;
            }
        }
        fitting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(kinds: &[KvKind]) -> KvSpec {
        let group = |&kind| KvGroup { layers: vec![0], kind, bytes_per_block: 96 };
        KvSpec { block_tokens: 16, groups: kinds.iter().map(group).collect() }
    }

    #[test]
    fn windows_bound_the_blocks_of_a_request() {
        let window = KvKind::Window { tokens: 128 };
        let gpt_oss = spec(&[KvKind::Full, window]);
        assert_eq!(gpt_oss.blocks_of_request(32_768, 1), 2048 + 10);
        assert_eq!(gpt_oss.blocks_of_request(32_768, 2048), 2048 + 138);
        assert_eq!(gpt_oss.blocks_of_request(100, 2048), 14);
        assert_eq!(gpt_oss.bytes_per_block(), 96);
        assert_eq!([2058, 2057].map(|blocks| gpt_oss.longest_request(blocks, 1)), [32_768, 32_752]);
        assert_eq!(spec(&[KvKind::Mla]).longest_request(7, 1 << 20), 112);
        assert_eq!(spec(&[KvKind::Full, KvKind::Full]).longest_request(1, 1), 0);
        assert_eq!(spec(&[KvKind::Full]).blocks_of_request(100, 7), 7);
        assert_eq!([0, 126, 127, 128, 500].map(|p| window.first_read(p)), [0, 0, 0, 1, 373]);
        assert_eq!(KvKind::Mla.first_read(500), 0);
    }

    #[test]
    fn state_groups_have_no_blocks() {
        let state = KvKind::State { slots_per_request: 1, bytes_per_slot: 1 << 21 };
        let mut hybrid = spec(&[KvKind::Full, state]);
        hybrid.groups[1].bytes_per_block = 0;
        assert_eq!(hybrid.blocks_of_request(100, 7), 7);
        assert_eq!((hybrid.bytes_per_block(), hybrid.longest_request(7, 1)), (96, 112));
        assert_eq!((state.window(), state.first_read(5)), (None, 6));
        assert!(hybrid.has_state() && !spec(&[KvKind::Full]).has_state());
        assert_eq!(hybrid.bytes_per_state_slot(), 1 << 21);
        assert_eq!([1, 256].map(|requests| hybrid.state_slots(requests)), [5, 320]);
        let full = spec(&[KvKind::Full]);
        assert_eq!((full.state_slots(256), full.bytes_per_state_slot()), (0, 0));
    }
}
