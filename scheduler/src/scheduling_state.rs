//! Requests of one replica and their steps in flight.
//!
//! Every request is in exactly one of two queues, waiting or running; it has no other status. All counters
//! can be derived from the queues, and `check` recomputes them.

use crate::kv_group_hits::KvGroupHits;
use crate::request::Request;
use crate::request_queue::RequestQueue;
use crate::slab::{RequestSlab, SlabSlot};
use crate::stats::{ExecutorFailureCounts, RecomputedTokenCounts, RequeueReason, SpecDecodeStats};
use kvcache::{BlockHasher, BlockTables, KvCache, KvConfig, StateSlots};
use protocol::{Replica, RequestId, SequenceSlot, StepId};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// Requests, queues and steps in flight of one replica.
#[derive(Debug)]
pub(crate) struct ReplicaRequests {
    /// Replica to which the requests and queues belong.
    pub(crate) replica: Replica,
    pub(crate) requests: RequestSlab<Request>,
    pub(crate) running: RequestQueue,
    pub(crate) waiting: RequestQueue,
    /// Committed tokens of the waiting requests.
    pub(crate) waiting_tokens: u64,
    /// Free blocks reserved for non-preemptible requests, summed over requests.
    pub(crate) reserved_blocks: u32,
    /// Steps sent to the executors without an applied output, oldest first.
    pub(crate) steps_in_flight: VecDeque<ScheduledStep>,
    /// Id of the last step sent.
    pub(crate) step: StepId,
    /// The head of the waiting queue, if it was not admitted for lack of KV blocks.
    pub(crate) blocked_head: Option<BlockedQueueHead>,
    pub(crate) hasher: BlockHasher,
    pub(crate) totals: ReplicaCounters,
    pub(crate) kv_group_hits: KvGroupHits,
    /// Free sequence slots, lowest first.
    free_seq_slots: BinaryHeap<Reverse<u32>>,
    /// Empty row buffers and block tables that are reused, so that a step does not allocate memory.
    spare_row_buffers: Vec<Vec<ScheduledRow>>,
    spare_block_tables: Vec<BlockTables>,
}

/// A step in flight.
#[derive(Debug)]
pub(crate) struct ScheduledStep {
    pub(crate) step: StepId,
    pub(crate) rows: Vec<ScheduledRow>,
}

/// One row of a step in flight: the data needed to apply its result.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScheduledRow {
    pub(crate) slot: SlabSlot,
    pub(crate) request: RequestId,
    pub(crate) epoch: u32,
    pub(crate) len: u32,
    pub(crate) drafts: u8,
    pub(crate) samples: bool,
}

/// The head of the waiting queue, if it was not admitted for lack of blocks. The prefix lookup of this
/// request is not repeated until the number of free blocks may suffice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockedQueueHead {
    pub(crate) request: RequestId,
    /// Number of free blocks that the request needed, including the unreferenced blocks of its prefix hit.
    pub(crate) needed_blocks: u32,
    /// Number of blocks of the request's prefix hit that no request referenced. If another request references
    /// these blocks, this request needs no free blocks for them.
    pub(crate) evictable_hits: u32,
    /// Value of `KvCache::published_blocks` when the request was not admitted.
    pub(crate) published_blocks: u64,
    /// Value of `StateCache::published_checkpoints` when the request was not admitted.
    pub(crate) published_checkpoints: u64,
}

/// Monotonic counters of one replica, reported in `SchedulerStats`.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReplicaCounters {
    pub(crate) steps: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) prompt_tokens_cached: u64,
    pub(crate) generated_tokens: u64,
    pub(crate) drafts: SpecDecodeStats,
    pub(crate) preemptions: u64,
    pub(crate) requests_recovered: ExecutorFailureCounts,
    pub(crate) recomputed_tokens: RecomputedTokenCounts,
    pub(crate) prefix_queries: u64,
    pub(crate) prefix_hits: u64,
    pub(crate) rows_dropped: u64,
    pub(crate) outputs_dropped: u64,
}

impl ReplicaRequests {
    pub(crate) fn new(replica: Replica, seq_slots: u32, kv: &KvConfig) -> Self {
        Self {
            replica,
            requests: RequestSlab::new(),
            running: RequestQueue::default(),
            waiting: RequestQueue::default(),
            waiting_tokens: 0,
            reserved_blocks: 0,
            steps_in_flight: VecDeque::new(),
            step: StepId(0),
            blocked_head: None,
            hasher: kv.block_hasher(),
            totals: ReplicaCounters::default(),
            kv_group_hits: KvGroupHits::new(&kv.spec),
            free_seq_slots: (0..seq_slots).map(Reverse).collect(),
            spare_row_buffers: Vec::new(),
            spare_block_tables: Vec::new(),
        }
    }

    pub(crate) fn free_slot_count(&self) -> u32 {
        self.free_seq_slots.len() as u32
    }

    pub(crate) fn take_sequence_slot(&mut self) -> SequenceSlot {
        SequenceSlot(self.free_seq_slots.pop().expect("the plan counted the free sequence slots").0)
    }

    /// Adds a request to the waiting queue.
    pub(crate) fn enqueue(&mut self, request: Request) -> SlabSlot {
        self.waiting_tokens += u64::from(request.len);
        let key = request.cold_fields.queue_key;
        let slot = self.requests.insert(request);
        self.waiting.insert(key, slot);
        slot
    }

    /// Frees the blocks and the sequence slot of a running request; the caller removes it from the running
    /// queue.
    pub(crate) fn release(&mut self, slot: SlabSlot, kv: &mut KvCache) {
        let request = &mut self.requests[slot];
        self.spare_block_tables.push(request.free_blocks(kv));
        self.reserved_blocks -= request.reserved_blocks;
        request.reserved_blocks = 0;
        let seq_slot = request.seq_slot.take().expect("a running request has a sequence slot");
        self.free_seq_slots.push(Reverse(seq_slot.0));
    }

    /// Moves a running request back to the waiting queue, to be recomputed.
    pub(crate) fn requeue(&mut self, slot: SlabSlot, kv: &mut KvCache, reason: RequeueReason) {
        self.release(slot, kv);
        let request = &mut self.requests[slot];
        request.cold_fields.params.last_requeue = Some((reason, request.computed_tokens));
        request.restart();
        request.flush_tail();
        if kv.is_caching() {
            request.extend_block_keys(&self.hasher);
        }
        self.waiting_tokens += u64::from(request.len);
        self.waiting.insert(request.cold_fields.queue_key, slot);
    }

    pub(crate) fn take_spare_block_tables(&mut self) -> BlockTables {
        self.spare_block_tables.pop().unwrap_or_default()
    }

    pub(crate) fn take_spare_row_buffer(&mut self) -> Vec<ScheduledRow> {
        self.spare_row_buffers.pop().unwrap_or_default()
    }

    pub(crate) fn recycle_rows(&mut self, mut rows: Vec<ScheduledRow>) {
        rows.clear();
        self.spare_row_buffers.push(rows);
    }

    /// Returns whether no request is waiting or running and no step is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.requests.len() == 0 && self.steps_in_flight.is_empty()
    }

    /// Panics unless `reserved <= free + cached` blocks and `running requests + free slots == seq_slots`. The
    /// cost is constant, so that it can be called in every step.
    pub(crate) fn check_counters(&self, kv: &KvCache, seq_slots: u32) {
        let counts = kv.counts();
        assert!(
            self.reserved_blocks <= counts.free + counts.cached,
            "reserved blocks are not free"
        );
        let running = self.running.len() as u32;
        assert_eq!(
            running + self.free_slot_count(),
            seq_slots,
            "running requests and free slots differ from the number of sequence slots"
        );
    }

    /// Returns the block tables of all requests. Every block in use is in at least one of these tables.
    pub(crate) fn block_tables(&self) -> impl Iterator<Item = &BlockTables> {
        self.requests.iter().map(|(_, request)| &request.cold_fields.block_tables)
    }

    /// Returns the state slots of all requests.
    pub(crate) fn state_slots(&self) -> impl Iterator<Item = &StateSlots> {
        self.requests.iter().map(|(_, request)| &request.cold_fields.states.slots)
    }

    /// Recomputes every counter of the state from its requests and sequence slots; panics on a difference.
    pub(crate) fn check(&self, kv: &KvCache, seq_slots: u32) {
        self.check_counters(kv, seq_slots);
        self.check_queues();
        self.check_in_flight(kv);
        let reserved: u32 = self.requests.iter().map(|(_, r)| r.reserved_blocks).sum();
        assert_eq!(reserved, self.reserved_blocks, "reserved blocks miscounted");
        let slots_in_use = self.running.slots().filter_map(|slot| self.requests[slot].seq_slot);
        let mut slots: Vec<u32> = slots_in_use.map(|seq_slot| seq_slot.0).collect();
        slots.extend(self.free_seq_slots.iter().map(|seq_slot| seq_slot.0));
        slots.sort_unstable();
        assert!(
            slots.iter().copied().eq(0..seq_slots),
            "a sequence slot is missing or assigned twice"
        );
        if self.is_idle() {
            assert_eq!(kv.counts().in_use, 0, "an idle replica has blocks in use");
            for group in 0..kv.states().groups() {
                let in_use = kv.states().counts(group).in_use;
                assert_eq!(in_use, 0, "an idle replica has slots of state group {group} in use");
            }
        }
    }

    /// Panics unless each running non-preemptible request holds and reserves as many blocks as it can hold at a
    /// time; `blocks_of_request` returns this number for its length limit.
    pub(crate) fn check_reserves(&self, blocks_of_request: impl Fn(u32) -> u32) {
        let running = self.running.slots().map(|slot| &self.requests[slot]);
        for request in running.filter(|request| request.non_preemptible) {
            let tables = request.cold_fields.block_tables.iter();
            let held: usize = tables.map(|table| table.held().len()).sum();
            assert_eq!(
                held as u32 + request.reserved_blocks,
                blocks_of_request(request.limit),
                "blocks held and reserved by non-preemptible {:?}",
                request.id
            );
        }
    }

    fn check_queues(&self) {
        let queues = [&self.waiting, &self.running];
        assert_eq!(queues.map(RequestQueue::len).iter().sum::<usize>(), self.requests.len());
        let mut waiting_tokens = 0;
        for queue in queues {
            let keys: Vec<_> = queue.iter().map(|(key, _)| key).collect();
            assert!(keys.is_sorted_by(|a, b| a < b), "a queue is out of order");
            let keys_match =
                queue.iter().all(|(key, slot)| self.requests[slot].cold_fields.queue_key == key);
            assert!(keys_match, "a queue entry refers to the wrong request");
        }
        for request in self.waiting.slots().map(|slot| &self.requests[slot]) {
            waiting_tokens += request.tokens().len() as u64;
            let cold = &*request.cold_fields;
            let is_empty = cold.block_tables.is_empty() && cold.states.slots.is_empty();
            assert!(
                is_empty && request.seq_slot.is_none(),
                "a waiting request holds blocks, state slots or a sequence slot"
            );
            assert_eq!((request.computed_tokens, request.rows_in_flight), (0, 0));
        }
        assert_eq!(waiting_tokens, self.waiting_tokens, "waiting tokens miscounted");
    }

    fn check_in_flight(&self, kv: &KvCache) {
        for (slot, request) in self.requests.iter() {
            request.check(kv);
            let (mut rows, mut pending, mut draft_slack) = (0, 0, 0);
            for row in self.steps_in_flight.iter().flat_map(|scheduled| &scheduled.rows) {
                let live = row.slot == slot && row.request == request.id;
                if live && row.epoch == request.epoch {
                    rows += 1;
                    pending += u8::from(row.samples);
                    draft_slack += u16::from(row.drafts);
                }
            }
            let counted = (request.rows_in_flight, request.pending_samples, request.draft_slack);
            assert_eq!(counted, (rows, pending, draft_slack), "rows in flight of {:?}", request.id);
        }
    }
}
