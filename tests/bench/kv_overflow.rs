//! What a step pays for KV events when their publisher stands still: 200,000 cached blocks, and steps that each
//! evict and store 32. All times are processor times.
//!
//! The queue fills, overflows, and is empty again once the publisher comes back; each `flush` is timed. Next to it
//! what the same moments cost elsewhere: the batch of everything on the publisher's thread, and the copy of all
//! hashes that `/debug/kv` asks the scheduler's thread for.

use hadron::config::EventFormat;
use hadron::kv_events::{Bell, Changes, Encoder, Feed, Figures, Journal, Room};
use kvcache::{Content, Hasher, KvCache, KvConfig, Table};
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
/// As many as replace every block.
const BEHIND: usize = (BLOCKS / STEP_BLOCKS) as usize;

/// A cache whose every step is a prompt that nobody has sent before.
struct Cache {
    kv: KvCache,
    hasher: Hasher,
    prompts: u32,
}

impl Cache {
    fn full() -> Self {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups: vec![group] };
        let config = KvConfig::new(spec, BLOCKS, [1, 2]);
        let kv = KvCache::new(&config).unwrap();
        let mut cache = Self { kv, hasher: config.hasher(), prompts: 0 };
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
        self.hasher.extend(&mut keys, &tokens, None);
        let content = Content { tokens: &tokens, keys: &keys, extra: None };
        let mut table = Table::default();
        self.kv.grow(&mut table, STEP_BLOCKS);
        for index in 0..STEP_BLOCKS {
            self.kv.publish(&mut table, index, content);
        }
        self.kv.free(&mut table);
    }
}

/// Processor time of this thread so far: other load does not count.
fn processor_time() -> Duration {
    let spent = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32)
}

/// Processor time that `work` takes, and what it returns.
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = processor_time();
    let result = work();
    (processor_time().saturating_sub(start), result)
}

/// Times of `steps` flushes.
fn flushes(cache: &mut Cache, feed: &mut Feed, steps: usize) -> Vec<Duration> {
    let flush = |_| {
        cache.prompt();
        feed.gather(cache.kv.take_events());
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
#[ignore = "a measurement; run it alone"]
fn a_publisher_that_stands_still() {
    let mut cache = Cache::full();
    let known = cache.kv.take_events();
    let encoder = Encoder {
        format: EventFormat::Map,
        rank: 0,
        block_tokens: BLOCK_TOKENS,
        medium: "GPU",
        kinds: vec!["full_attention"],
        token_ids: true,
    };
    let mut journal = Journal::new(encoder, 0, 10);
    journal.append(0.0, &[KvEvent::Cleared]).unwrap();
    journal.append(0.0, &known).unwrap();
    let (near, _far) = UnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    let bell = Bell::new(near, Arc::new(AtomicBool::new(false)));
    let figures = Arc::new(Figures::default());
    let (mut feed, changes) =
        Feed::new(Room { batches: QUEUE, bytes: u64::MAX }, BLOCKS, bell, Arc::clone(&figures));

    println!("| flush | steps | p50 | worst |\n|---|--:|--:|--:|");
    report("while there is room", flushes(&mut cache, &mut feed, QUEUE));
    report("that finds the queue full first", flushes(&mut cache, &mut feed, 1));
    report("while the publisher stands still", flushes(&mut cache, &mut feed, BEHIND));
    let mut publish = || {
        let mut longest = Duration::ZERO;
        for changes in changes.try_iter() {
            figures.taken(&changes);
            let (took, _) = timed(|| match changes {
                Changes::Step(ts, events) => journal.append(ts, &events),
                Changes::Missed(ts, arrears) => journal.catch_up(ts, *arrears),
            });
            longest = longest.max(took);
        }
        (longest, journal.blocks())
    };
    publish();
    report("that hands over what is owed", flushes(&mut cache, &mut feed, 1));
    let (everything, told) = publish();
    assert_eq!(told, BLOCKS as usize, "blocks that a subscriber knows");
    println!("the batch of everything, on the publisher's thread: {everything:?}");
    let (took, hashes) = timed(|| cache.kv.hashes().collect::<Vec<_>>().len());
    println!("a copy of {hashes} hashes for /debug/kv: {took:?}");
}
