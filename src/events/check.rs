//! `hadron events check`: subscribes to KV events for a given time and verifies the guarantees of their
//! format.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

use anyhow::{Context as _, Result};

use super::source;
use super::subscriber::{EventSubscriber, RawKvEventBatch, SubscriptionEvent};
use crate::config::{EventsCheckArgs, ProcessEnvironment};
use metrics::kv_events::{DecodedKvEvent, KvEventViolation, SubscriberBlocks, decode};

/// Maximum number of violations that are printed; further violations are only counted.
const VIOLATIONS_SHOWN: usize = 20;
/// Maximum number of received batches that are kept for the comparison with a replay.
const LIVE_BATCHES_COMPARED_MAX: usize = 10_000;

/// Receives events, compares them with a replay and prints a report. The exit code is 1 if a violation was
/// found.
pub(super) fn run(args: &EventsCheckArgs, environment: &ProcessEnvironment) -> Result<ExitCode> {
    let addresses = source::resolve(&args.subscribe, environment)?;
    let mut subscribe = args.subscribe.clone();
    if addresses.replay.is_some() {
        subscribe.from.get_or_insert(0);
    }
    let mut subscriber = EventSubscriber::open(&subscribe, &addresses, Some(args.duration.0))?;
    let mut check = KvEventStreamChecker::default();
    while let Some(event) = subscriber.next()? {
        check.add_event(event);
    }
    if subscriber.replays() {
        check.compare(&subscriber)?;
    }
    if let Some(path) = &args.blocks {
        let hashes: BTreeSet<String> = check.blocks.hashes().map(ToString::to_string).collect();
        let text: String = hashes.into_iter().map(|hash| hash + "\n").collect();
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    write!(std::io::stdout(), "{}", check.report())?;
    Ok(if check.violations_total == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Checks the batches of a KV-event stream when they are received, counts them, and collects violations of
/// the format.
#[derive(Default)]
struct KvEventStreamChecker {
    batches: u64,
    replayed: u64,
    first: Option<u64>,
    last: u64,
    stored: u64,
    removed: u64,
    cleared: u64,
    idle_batches: u64,
    gaps: u64,
    missing: u64,
    restarts: u64,
    compared: u64,
    blocks: SubscriberBlocks,
    /// Payloads of the newest batches of the live stream, by sequence number. They are compared with a
    /// replay.
    live: BTreeMap<u64, Vec<u8>>,
    violations: Vec<String>,
    violations_total: u64,
}

impl KvEventStreamChecker {
    fn add_violation(&mut self, text: String) {
        self.violations_total += 1;
        if self.violations.len() < VIOLATIONS_SHOWN {
            self.violations.push(text);
        }
    }

    fn add_event(&mut self, event: SubscriptionEvent) {
        match event {
            SubscriptionEvent::Batch(batch) => self.add_batch(batch),
            SubscriptionEvent::Gap { from, to, replayed } => {
                self.gaps += 1;
                if replayed == 0 {
                    self.missing += to - from + 1;
                    self.add_violation(format!("batches {from} to {to} are missing"));
                }
            }
            SubscriptionEvent::Restart { seq } => {
                self.restarts += 1;
                self.add_violation(format!("the sequence restarted at {seq}"));
            }
            SubscriptionEvent::Malformed(text) => self.add_violation(text),
        }
    }

    fn add_batch(&mut self, batch: RawKvEventBatch) {
        let RawKvEventBatch { seq, payload, replayed, .. } = batch;
        self.batches += 1;
        self.replayed += u64::from(replayed);
        self.first.get_or_insert(seq);
        self.last = seq;
        match decode(&payload) {
            Ok(decoded) => {
                self.idle_batches += u64::from(decoded.events.is_empty());
                for event in &decoded.events {
                    self.apply(seq, event);
                }
            }
            Err(error) => self.add_violation(format!("batch {seq}: {error}")),
        }
        if !replayed {
            self.live.insert(seq, payload);
            if self.live.len() > LIVE_BATCHES_COMPARED_MAX {
                self.live.pop_first();
            }
        }
    }

    fn apply(&mut self, seq: u64, event: &DecodedKvEvent) {
        match event {
            DecodedKvEvent::BlockStored(stored) => self.stored += stored.block_hashes.len() as u64,
            DecodedKvEvent::BlockRemoved(removed) => {
                self.removed += removed.block_hashes.len() as u64;
            }
            DecodedKvEvent::AllBlocksCleared => self.cleared += 1,
        }
        let mut violations: Vec<KvEventViolation> = Vec::new();
        self.blocks.apply(event, &mut violations);
        for violation in violations {
            self.add_violation(format!("batch {seq}: {violation}"));
        }
    }

    /// Checks that a replay returns the same bytes as the live stream, and that a replay from sequence number
    /// 0 gives the same set of blocks.
    fn compare(&mut self, subscriber: &EventSubscriber) -> Result<()> {
        self.compare_payloads(subscriber)?;
        self.compare_block_sets(subscriber)
    }

    /// Checks that a replay of the batches in `live` returns the same bytes.
    fn compare_payloads(&mut self, subscriber: &EventSubscriber) -> Result<()> {
        let Some(&first) = self.live.keys().next() else { return Ok(()) };
        for batch in subscriber.replay(first)? {
            let Some(live) = self.live.get(&batch.seq) else { continue };
            self.compared += 1;
            if *live != batch.payload {
                self.add_violation(format!(
                    "the replay of batch {} has different bytes",
                    batch.seq
                ));
            }
        }
        Ok(())
    }

    /// Checks that a replay from sequence number 0 gives the same set of blocks as the live stream.
    fn compare_block_sets(&mut self, subscriber: &EventSubscriber) -> Result<()> {
        let (mut replayed_blocks, mut violations, mut last) =
            (SubscriberBlocks::default(), Vec::new(), None);
        for batch in subscriber.replay(0)? {
            last = Some(batch.seq);
            let events = decode(&batch.payload).map(|payload| payload.events).unwrap_or_default();
            for event in &events {
                replayed_blocks.apply(event, &mut violations);
            }
        }
        let set = |blocks: &SubscriberBlocks| blocks.hashes().cloned().collect::<BTreeSet<_>>();
        // If the replay contains a batch that was published after the last received batch, a difference
        // between the two sets of blocks is not a violation.
        if last == Some(self.last)
            && self.blocks.is_complete()
            && set(&replayed_blocks) != set(&self.blocks)
        {
            let (live, replayed) = (self.blocks.len(), replayed_blocks.len());
            self.add_violation(format!(
                "the live set has {live} blocks, the replayed set {replayed}"
            ));
        }
        Ok(())
    }

    fn report(&self) -> String {
        let Self {
            batches, replayed, idle_batches, stored, removed, cleared, gaps, missing, ..
        } = self;
        let mut text = String::new();
        let range = self
            .first
            .map_or_else(|| "no batch".to_owned(), |first| format!("{first} to {}", self.last));
        let completeness = if self.blocks.is_complete() {
            ""
        } else {
            " (subscribed late: older blocks are unknown)"
        };
        // A write to a string cannot fail.
        let _ = writeln!(
            text,
            "batches    {batches}, {replayed} of them replayed, {idle_batches} empty"
        );
        let _ = writeln!(
            text,
            "sequence   {range}; {gaps} gaps, {missing} batches missing, {} restarts",
            self.restarts
        );
        let _ = writeln!(
            text,
            "blocks     {stored} stored, {removed} removed, {cleared} clears; {} in the set{completeness}",
            self.blocks.len()
        );
        let _ = writeln!(
            text,
            "replay     {} live batches compared byte for byte with their replay",
            self.compared
        );
        for violation in &self.violations {
            let _ = writeln!(text, "FAULT      {violation}");
        }
        let omitted = self.violations_total - self.violations.len() as u64;
        if omitted > 0 {
            let _ = writeln!(text, "FAULT      and {omitted} more");
        }
        let verdict = if self.violations_total == 0 { "ok" } else { "FAILED" };
        let _ = writeln!(text, "{verdict}");
        text
    }
}
