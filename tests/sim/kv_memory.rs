//! Memory of the simulated KV caches in bytes: each group stores its own number of bytes per block, and groups that keep all
//! positions are MLA groups in some simulations. As on a device, the memory that is given to the blocks determines their
//! number. I24: the pool uses the memory that it was given except for less than one block, and each block and state slot
//! that a row accesses is within this memory.

use crate::batch_checks::BatchChecker;
use crate::invariant::{CheckResult, ensure};
use crate::rng::SimRng;
use crate::sim_config::SimConfig;
use protocol::{Batch, BatchRow, BlockId, KvGroup, KvKind, KvSpec};
use scheduler::{KvConfig, Scheduler, SchedulerConfig, SchedulerLimits};

/// The XOR of this value and a seed is the seed of the random number generator that draws the kinds of groups and their
/// bytes, so that these draws change no other draw of the seed.
pub(crate) const MEMORY_DRAWS_STREAM: u64 = 0x2000_0000_0000_0000;

/// Memory of a replica's KV cache, computed from the groups alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SimKvMemory {
    /// Bytes of one block of the pool: those of the group that stores most.
    block_bytes: u64,
    /// Bytes that are given to the pool and too few for a further block.
    unused: u64,
    /// Bytes that are given to the state slots of all state groups.
    state_bytes: u64,
}

impl SimKvMemory {
    /// Returns the bytes that are given to a pool of `blocks` blocks.
    pub(crate) fn pool_bytes(&self, blocks: u32) -> u64 {
        u64::from(blocks) * self.block_bytes + self.unused
    }
}

/// Returns the number of blocks that fit in `bytes` bytes, as the executors compute it.
pub(crate) fn blocks_in(spec: &KvSpec, bytes: u64) -> u32 {
    (bytes / spec.bytes_per_block()) as u32
}

impl SimConfig {
    /// Draws which of the groups that keep all positions are MLA groups, the bytes of each group, and the memory of the KV
    /// cache. The number of blocks does not change if the bytes of a block are computed correctly.
    pub(crate) fn draw_kv_memory(&mut self, rng: &mut SimRng) {
        let kv = &mut self.scheduler.kv;
        let has_mla = rng.chance_per_mille(500);
        // Per token: one byte; MLA in one layer, with 8-bit and 16-bit elements; all layers of large models.
        let bytes_per_token = rng.pick(&[1, 3, 656, 1_152, 4_096, 70_272, 327_680]);
        let bytes_per_block = u64::from(kv.spec.block_tokens) * bytes_per_token;
        // The groups of most models store equal numbers of bytes.
        let largest_multiple = if rng.chance_per_mille(500) { 4 } else { 1 };
        for group in &mut kv.spec.groups {
            if let KvKind::State { bytes_per_slot, .. } = &mut group.kind {
                *bytes_per_slot = rng.scaled(1, 1 << 24).into();
                continue;
            }
            if has_mla && group.kind == KvKind::Full && rng.chance_per_mille(700) {
                group.kind = KvKind::Mla;
            }
            group.bytes_per_block = bytes_per_block * u64::from(rng.between(1, largest_multiple));
        }
        let groups = &kv.spec.groups;
        let block_bytes = groups.iter().map(|group| group.bytes_per_block).max().unwrap_or(0);
        let state_bytes =
            groups.iter().map(|group| u64::from(kv.state_slots) * bytes_per_slot(group)).sum();
        self.kv_memory = SimKvMemory { block_bytes, unused: rng.below(block_bytes), state_bytes };
        kv.blocks = blocks_in(&kv.spec, self.kv_memory.pool_bytes(kv.blocks));
    }

    /// Whether the model has MLA groups.
    pub(crate) fn has_mla(&self) -> bool {
        self.kv_kinds().any(|kind| kind == KvKind::Mla)
    }

    /// Whether the groups with blocks store different numbers of bytes per block.
    pub(crate) fn block_bytes_differ(&self) -> bool {
        let groups = &self.scheduler.kv.spec.groups;
        let with_blocks = groups.iter().filter(|group| !group.kind.is_state());
        with_blocks.clone().any(|group| group.bytes_per_block < self.kv_memory.block_bytes)
    }
}

/// Bytes of a group in one state slot.
fn bytes_per_slot(group: &KvGroup) -> u64 {
    match group.kind {
        KvKind::State { bytes_per_slot, .. } => bytes_per_slot,
        KvKind::Full | KvKind::Mla | KvKind::Window { .. } => 0,
    }
}

impl BatchChecker {
    /// Checks I24 for a batch that `check` has recorded. `pool_blocks` is the number of blocks in the scheduler's pool and
    /// `pool_bytes` the memory that the executors gave to it.
    pub(crate) fn check_memory(
        &self,
        batch: &Batch,
        config: &SimConfig,
        pool_blocks: u32,
        pool_bytes: u64,
    ) -> CheckResult {
        let spec = &config.scheduler.kv.spec;
        let block_bytes = spec.bytes_per_block();
        let used = u64::from(pool_blocks) * block_bytes;
        let fills = (used..used + block_bytes).contains(&pool_bytes);
        ensure!("I24", fills, "{pool_blocks} blocks of {block_bytes} bytes in {pool_bytes} bytes");
        for row in &batch.rows {
            let tables = self.block_tables(row).iter().zip(&spec.groups).enumerate();
            for (index, (table, group)) in tables {
                let bytes = group.bytes_per_block;
                let fits = |block: &BlockId| {
                    bytes <= block_bytes && u64::from(block.0) * block_bytes + bytes <= pool_bytes
                };
                let beyond = table.iter().find(|&block| *block != BlockId::NULL && !fits(block));
                ensure!(
                    "I24",
                    beyond.is_none(),
                    "request {}: {beyond:?} of group {index} has {bytes} bytes, blocks of {block_bytes} \
                     bytes in {pool_bytes} bytes",
                    row.request.0
                );
            }
            check_state_memory(row, config)?;
        }
        Ok(())
    }
}

/// Checks that the state slots of a row are in the memory of the states, in which the slots of one group follow those of the
/// group before it.
fn check_state_memory(row: &BatchRow, config: &SimConfig) -> CheckResult {
    let kv = &config.scheduler.kv;
    let given = u64::from(kv.state_slots) * kv.spec.bytes_per_state_slot();
    ensure!("I24", given == config.kv_memory.state_bytes, "{given} bytes of states: {config:?}");
    for access in &row.state_slots {
        let (before, group) = kv.spec.groups.split_at(usize::from(access.group));
        let first: u64 = before.iter().map(bytes_per_slot).sum::<u64>() * u64::from(kv.state_slots);
        let bytes = bytes_per_slot(&group[0]);
        let slots = [access.read, Some(access.write)];
        let mut ends = slots.iter().flatten().map(|slot| first + (u64::from(slot.0) + 1) * bytes);
        let fits = ends.all(|end| end <= given);
        ensure!("I24", fits, "request {}: {access:?} in {given} bytes", row.request.0);
    }
    Ok(())
}

/// Returns the message of `Scheduler::new` for the groups of a KV layout; empty if they are valid.
fn rejection(groups: Vec<KvGroup>) -> String {
    let spec = KvSpec { block_tokens: 4, groups };
    let state_slots = if spec.has_state() { 3 } else { 0 };
    let kv = KvConfig { state_slots, ..KvConfig::new(spec, 64, [1, 2]) };
    let config = SchedulerConfig::new(SchedulerLimits::cpu(32, 100), kv);
    Scheduler::new(config).err().map_or_else(String::new, |error| error.to_string())
}

#[test]
fn invalid_kv_layouts_are_rejected_with_their_reason() {
    let group = |kind, bytes_per_block| KvGroup { layers: vec![0], kind, bytes_per_block };
    let window = || group(KvKind::Window { tokens: 8 }, 200);
    let state = |bytes| group(KvKind::State { slots_per_request: 1, bytes_per_slot: 9 }, bytes);
    let mla = |bytes| group(KvKind::Mla, bytes);
    for valid in [
        vec![mla(100)],
        vec![mla(100), window()],
        vec![group(KvKind::Full, 300), mla(100), window(), state(0)],
        vec![mla(100), state(0)],
    ] {
        assert_eq!(rejection(valid), "");
    }
    let order =
        "KV groups that keep all positions must precede window groups, and these state groups";
    let without_bytes = "KV group 1 has 0 bytes per block, only state groups may";
    let state_with_bytes =
        "state group 1 has 9 bytes per slot, must be at least 1, and 7 bytes per block, must be 0";
    let without_positions = "KV group 0 stores recurrent state, but no group keeps all positions";
    for (invalid, reason) in [
        (vec![window(), mla(100)], order),
        (vec![state(0), mla(100)], order),
        (vec![mla(100), mla(0)], without_bytes),
        (vec![mla(100), state(7)], state_with_bytes),
        (vec![state(0)], without_positions),
    ] {
        assert_eq!(rejection(invalid), reason);
    }
}
