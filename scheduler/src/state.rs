//! The requests of one replica and what is in flight for them.
//!
//! A request lies in exactly one of two lines, waiting and running; which one is all there is to
//! know about its status. Counters repeat what the lines imply, and `check` recomputes them.

use crate::line::Line;
use crate::request::Request;
use crate::slab::{Slab, Slot};
use crate::stats::{ByLoss, Drafted, Recomputed, Requeue};
use kvcache::{Bug, Hasher, KvCache, Planted, Table};
use protocol::{Replica, RequestId, Seat, StepId};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// Requests, lines and steps in flight of one replica.
#[derive(Debug)]
pub(crate) struct State {
    /// Whose they are.
    pub(crate) replica: Replica,
    pub(crate) requests: Slab<Request>,
    pub(crate) running: Line,
    pub(crate) waiting: Line,
    /// Committed tokens of the waiting requests.
    pub(crate) waiting_tokens: u64,
    /// Free blocks set aside for guarded requests, in all.
    pub(crate) reserved: u32,
    /// Steps sent and not answered, oldest first.
    pub(crate) flights: VecDeque<Flight>,
    /// Last step sent.
    pub(crate) step: StepId,
    /// Why the head of the waiting line was not admitted, if blocks were the reason.
    pub(crate) blocked: Option<Blocked>,
    pub(crate) hasher: Hasher,
    pub(crate) planted: Planted,
    pub(crate) totals: Totals,
    /// Seats nobody has, lowest first.
    seats: BinaryHeap<Reverse<u32>>,
    /// Emptied buffers, kept so that a step allocates nothing.
    spare_rows: Vec<Vec<FlightRow>>,
    spare_tables: Vec<Table>,
}

/// A step on its way.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) step: StepId,
    pub(crate) rows: Vec<FlightRow>,
}

/// One row of a step on its way: enough to apply its result.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FlightRow {
    pub(crate) slot: Slot,
    pub(crate) request: RequestId,
    pub(crate) epoch: u32,
    pub(crate) len: u32,
    pub(crate) drafts: u8,
    pub(crate) samples: bool,
}

/// A waiting request that lacked blocks: until enough of them can have become free or shared,
/// looking again is in vain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocked {
    pub(crate) request: RequestId,
    /// Free blocks it needed, idle hits included.
    pub(crate) need: u32,
    /// Hits that nobody held: others may claim them and make them cost nothing.
    pub(crate) idle: u32,
    /// `KvCache::published` at that time.
    pub(crate) published: u64,
}

/// Counters that only grow.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Totals {
    pub(crate) steps: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) prompt_tokens_cached: u64,
    pub(crate) generated_tokens: u64,
    pub(crate) drafts: Drafted,
    pub(crate) preemptions: u64,
    pub(crate) recovered: ByLoss,
    pub(crate) recomputed_tokens: Recomputed,
    pub(crate) prefix_queries: u64,
    pub(crate) prefix_hits: u64,
    pub(crate) rows_dropped: u64,
    pub(crate) outputs_dropped: u64,
}

impl State {
    pub(crate) fn new(replica: Replica, seats: u32, hasher: Hasher, planted: Planted) -> Self {
        Self {
            replica,
            requests: Slab::new(),
            running: Line::default(),
            waiting: Line::default(),
            waiting_tokens: 0,
            reserved: 0,
            flights: VecDeque::new(),
            step: StepId(0),
            blocked: None,
            hasher,
            planted,
            totals: Totals::default(),
            seats: (0..seats).map(Reverse).collect(),
            spare_rows: Vec::new(),
            spare_tables: Vec::new(),
        }
    }

    pub(crate) fn seats_left(&self) -> u32 {
        self.seats.len() as u32
    }

    pub(crate) fn take_seat(&mut self) -> Seat {
        Seat(self.seats.pop().expect("the plan counted its seats").0)
    }

    /// Puts a request that runs nowhere into the waiting line.
    pub(crate) fn enqueue(&mut self, request: Request) -> Slot {
        self.waiting_tokens += u64::from(request.len);
        let key = request.cold.key;
        let slot = self.requests.insert(request);
        self.waiting.insert(key, slot);
        slot
    }

    /// Takes a running request's blocks and seat back; it must leave the running line too.
    pub(crate) fn release(&mut self, slot: Slot, kv: &mut KvCache) {
        let request = &mut self.requests[slot];
        self.spare_tables.push(request.free(kv));
        self.reserved -= request.reserved;
        request.reserved = 0;
        let seat = request.seat.take().expect("a running request has a seat");
        self.seats.push(Reverse(seat.0));
    }

    /// Sends a running request back to its place in the waiting line, to be recomputed.
    pub(crate) fn requeue(&mut self, slot: Slot, kv: &mut KvCache, why: Requeue) {
        self.release(slot, kv);
        let request = &mut self.requests[slot];
        request.cold.asked.setback = Some((why, request.computed));
        let (epoch, sent, promised) = (request.epoch, request.sent, request.promised);
        request.restart();
        if self.planted.has(Bug::EpochNotBumped) {
            request.epoch = epoch;
        }
        if self.planted.has(Bug::TableNotResent) {
            request.sent = sent;
        }
        if self.planted.has(Bug::PreemptKeepsInFlight) && promised > 0 {
            request.commit(0);
        }
        request.gather();
        if kv.is_caching() {
            request.extend_keys(&self.hasher);
        }
        self.waiting_tokens += u64::from(request.len);
        self.waiting.insert(request.cold.key, slot);
    }

    pub(crate) fn spare_table(&mut self) -> Table {
        self.spare_tables.pop().unwrap_or_default()
    }

    pub(crate) fn spare_rows(&mut self) -> Vec<FlightRow> {
        self.spare_rows.pop().unwrap_or_default()
    }

    pub(crate) fn recycle_rows(&mut self, mut rows: Vec<FlightRow>) {
        rows.clear();
        self.spare_rows.push(rows);
    }

    /// Whether nothing is live and nothing in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.requests.len() == 0 && self.flights.is_empty()
    }

    /// Cheap enough for every step: blocks and seats add up.
    pub(crate) fn check_counters(&self, kv: &KvCache, seats: u32) {
        let free = kv.counts();
        assert!(self.reserved <= free.vacant + free.cached, "reserved blocks are not free");
        let running = self.running.len() as u32;
        assert_eq!(running + self.seats_left(), seats, "running requests and seats differ");
    }

    /// The tables of all requests: whatever holds blocks.
    pub(crate) fn tables(&self) -> impl Iterator<Item = &Table> {
        self.requests.iter().map(|(_, request)| &request.cold.table)
    }

    /// Recomputes every counter of requests and seats from its owners; panics on a difference.
    pub(crate) fn check(&self, kv: &KvCache, seats: u32) {
        self.check_counters(kv, seats);
        self.check_lines();
        self.check_flights();
        let reserved: u32 = self.requests.iter().map(|(_, r)| r.reserved).sum();
        assert_eq!(reserved, self.reserved, "reserved blocks miscounted");
        let seats_taken = self.running.slots().filter_map(|slot| self.requests[slot].seat);
        let mut taken: Vec<u32> = seats_taken.map(|seat| seat.0).collect();
        taken.extend(self.seats.iter().map(|seat| seat.0));
        taken.sort_unstable();
        assert!(taken.iter().copied().eq(0..seats), "a seat is lost or shared");
        if self.is_idle() {
            assert_eq!(kv.counts().in_use, 0, "an idle engine holds blocks");
        }
    }

    fn check_lines(&self) {
        let lines = [&self.waiting, &self.running];
        assert_eq!(lines.map(Line::len).iter().sum::<usize>(), self.requests.len());
        let mut waiting_tokens = 0;
        for line in lines {
            let keys: Vec<_> = line.iter().map(|(key, _)| key).collect();
            assert!(keys.is_sorted_by(|a, b| a < b), "a line is out of order");
            let same = line.iter().all(|(key, slot)| self.requests[slot].cold.key == key);
            assert!(same, "a line leads to the wrong request");
        }
        for request in self.waiting.slots().map(|slot| &self.requests[slot]) {
            waiting_tokens += request.tokens().len() as u64;
            let holds_nothing = request.blocks == 0 && request.seat.is_none();
            assert!(holds_nothing, "a waiting request holds blocks or a seat");
            assert_eq!((request.computed, request.rows_in_flight), (0, 0));
        }
        assert_eq!(waiting_tokens, self.waiting_tokens, "waiting tokens miscounted");
    }

    fn check_flights(&self) {
        for (slot, request) in self.requests.iter() {
            request.check();
            let (mut rows, mut promised, mut slack) = (0, 0, 0);
            for row in self.flights.iter().flat_map(|flight| &flight.rows) {
                let live = row.slot == slot && row.request == request.id;
                if live && row.epoch == request.epoch {
                    rows += 1;
                    promised += u8::from(row.samples);
                    slack += u16::from(row.drafts);
                }
            }
            let counted = (request.rows_in_flight, request.promised, request.slack);
            assert_eq!(counted, (rows, promised, slack), "rows in flight of {:?}", request.id);
        }
    }
}
