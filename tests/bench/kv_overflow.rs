//! Processor time that KV events cost per scheduler step if the publisher thread is stalled, for a cache of
//! 200,000 blocks and steps that each evict and store 32 blocks.
//!
//! Each call of `flush`, which passes the events of a step to the publisher's queue, is timed: while the
//! queue fills, after it has overflowed, and after the publisher has emptied it. Also measured, for
//! comparison: producing the batch with the whole index, on the publisher's thread, and copying all block
//! hashes for `/debug/kv`, on the scheduler's thread.

use kvcache::{BlockHasher, BlockTables, KvCache, KvConfig, SequenceContent, TableEntries};
use metrics::kv_events::KvEventFormat;
use metrics::kv_events::{
    EventJournal, FeedLimits, KvEventEncoder, KvEventFeed, PublisherCounters, PublisherWaker,
    QueuedKvEvents,
};
use protocol::{KvEvent, KvGroup, KvKind, KvSpec, Token};
use rustix::time::{ClockId, clock_gettime};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const BLOCKS: u32 = 200_000;
const BLOCK_TOKENS: u32 = 16;
const STEP_BLOCKS: u32 = 32;
const QUEUE: usize = 1_000;
/// Number of steps in which every cached block is evicted once.
const STEPS_TO_REPLACE_ALL: usize = (BLOCKS / STEP_BLOCKS) as usize;

/// A full KV cache. Each prompt stores its blocks and evicts the same number of older blocks.
struct EvictingCache {
    kv: KvCache,
    hasher: BlockHasher,
    prompts: u32,
}

impl EvictingCache {
    fn full() -> Self {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups: vec![group] };
        let config = KvConfig::new(spec, BLOCKS, [1, 2]);
        let kv = KvCache::new(&config).unwrap();
        let mut cache = Self { kv, hasher: config.block_hasher(), prompts: 0 };
        for _ in 0..BLOCKS / STEP_BLOCKS {
            cache.prompt();
        }
        assert_eq!(cache.kv.counts().cached, BLOCKS);
        cache
    }

    fn prompt(&mut self) {
        self.prompts += 1;
        let tokens: Vec<Token> = vec![self.prompts; (STEP_BLOCKS * BLOCK_TOKENS) as usize];
        let mut keys = Vec::new();
        self.hasher.extend_keys(&mut keys, &tokens, None);
        let content = SequenceContent { tokens: &tokens, block_keys: &keys, extra_keys: None };
        let mut tables = BlockTables::default();
        self.kv.grow(&mut tables, TableEntries::all(STEP_BLOCKS));
        for index in 0..STEP_BLOCKS {
            self.kv.publish(&mut tables, 0, index, content);
        }
        self.kv.free(&mut tables);
    }
}

/// Processor time that this thread has used so far; unlike wall-clock time it is not affected by other load.
fn processor_time() -> Duration {
    let spent = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32)
}

/// Runs `work`; returns the processor time that it took, and its result.
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = processor_time();
    let result = work();
    (processor_time().saturating_sub(start), result)
}

/// Returns the processor times of `steps` consecutive calls of `flush`, each after the events of one prompt.
fn flushes(cache: &mut EvictingCache, feed: &mut KvEventFeed, steps: usize) -> Vec<Duration> {
    let flush = |_| {
        cache.prompt();
        feed.add(cache.kv.take_events());
        timed(|| feed.flush()).0
    };
    (0..steps).map(flush).collect()
}

fn report(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let (p50, worst) = (us(times[times.len() / 2]), us(times[times.len() - 1]));
    println!("| {what} | {} | {p50:.1} µs | {worst:.1} µs |", times.len());
}

#[test]
#[ignore = "measures times: `just kv-overflow`"]
fn step_cost_with_a_stalled_publisher() {
    let mut cache = EvictingCache::full();
    let known = cache.kv.take_events();
    let encoder = KvEventEncoder {
        format: KvEventFormat::Map,
        rank: 0,
        block_tokens: BLOCK_TOKENS,
        medium: "GPU",
        kinds: vec![protocol::KvKind::Full],
        token_ids: true,
    };
    let mut journal = EventJournal::new(encoder, 0, 10);
    journal.append(0.0, &[KvEvent::Cleared]).unwrap();
    journal.append(0.0, &known).unwrap();
    let (near, _far) = UnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    let bell = PublisherWaker::new(near, Arc::new(AtomicBool::new(false)));
    let counters = Arc::new(PublisherCounters::default());
    let (mut feed, changes) = KvEventFeed::new(
        FeedLimits { batches: QUEUE, bytes: u64::MAX },
        BLOCKS,
        bell,
        Arc::clone(&counters),
    );

    println!("| flush | steps | p50 | max |\n|---|--:|--:|--:|");
    report("while the queue has room", flushes(&mut cache, &mut feed, QUEUE));
    report("first flush with a full queue", flushes(&mut cache, &mut feed, 1));
    report("while the publisher is stalled", flushes(&mut cache, &mut feed, STEPS_TO_REPLACE_ALL));
    let mut publish = || {
        let mut longest = Duration::ZERO;
        for changes in changes.try_iter() {
            counters.record_dequeued(&changes);
            let (took, _) = timed(|| match changes {
                QueuedKvEvents::Step(ts, events) => journal.append(ts, &events),
                QueuedKvEvents::Backlog(ts, arrears) => journal.append_backlog(ts, *arrears),
            });
            longest = longest.max(took);
        }
        (longest, journal.blocks())
    };
    publish();
    report("after the stall: hands over the backlog", flushes(&mut cache, &mut feed, 1));
    let (everything, told) = publish();
    assert_eq!(told, BLOCKS as usize, "blocks in a subscriber's index");
    println!("the batch of everything, on the publisher's thread: {everything:?}");
    let (took, hashes) = timed(|| cache.kv.indexed_hashes(0).collect::<Vec<_>>().len());
    println!("a copy of {hashes} hashes for /debug/kv: {took:?}");
}
