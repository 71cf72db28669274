//! What a seed decides before the first event: sizes, limits, and which faults happen how often.

use crate::chance::Chance;
use scheduler::{EngineConfig, KvConfig, Limits, Planted, Routing, Share};

/// Seeds from here on draw worlds whose replicas are a group of 2 to 8 ranks that step together.
pub(crate) const GROUPS: u64 = 1_000_000_000;
/// What sets the stream of later draws apart from a seed's own; under this one the seeds of `regressions.rs` draw no fault.
pub(crate) const LATER: u64 = 0x1000_0000_0000_0000;
/// Seeds from here on draw worlds whose links break and whose KV-event subscribers come and go.
pub(crate) const LINKS: u64 = 2_000_000_000;

/// The drawn configuration of a world.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    /// The engine's configuration.
    pub(crate) engine: EngineConfig,
    /// How requests look and arrive.
    pub(crate) load: Load,
    /// What goes wrong.
    pub(crate) faults: Faults,
    /// Whether a step of a rank ends only once all ranks of its group have begun theirs, as collectives make it.
    pub(crate) coupled: bool,
    /// Whether executors give signs of life, and are given up for want of them.
    pub(crate) watched: bool,
}

/// How requests look and arrive.
#[derive(Debug, Clone)]
pub(crate) struct Load {
    /// Requests in all.
    pub(crate) requests: u32,
    /// Longest pause between two arrivals.
    pub(crate) gap_ms: u32,
    /// Requests in 1000 whose prompt begins like an earlier one's.
    pub(crate) shared: u32,
    /// Requests in 1000 that continue an earlier request's prompt and answer.
    pub(crate) continued: u32,
    /// Requests in 1000 whose tokens are masked.
    pub(crate) constrained: u32,
    /// Cache salts in use; 0 = none.
    pub(crate) salts: u32,
    /// Requests in 1000 that are called what an earlier one is.
    pub(crate) namesakes: u32,
    /// Whether priorities differ.
    pub(crate) priorities: bool,
    /// Longest answer asked for.
    pub(crate) answer: u32,
    /// Longest prompt. Short prompts with long answers grow while they run: the food of preemption.
    pub(crate) prompt: u32,
    /// Requests in 1000 that break a limit on purpose.
    pub(crate) hopeless: u32,
    /// Longest one-way delay of a link.
    pub(crate) link_ms: u32,
    /// Longest step on a device.
    pub(crate) step_ms: u32,
}

/// Rates of faults, in 1000 unless named otherwise; 0 = switched off for this seed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Faults {
    /// Requests aborted at some time, also twice and after their end.
    pub(crate) abort: u32,
    /// Outputs followed by the death of their executor, and how many deaths at most.
    pub(crate) crash: u32,
    /// Deaths at most.
    pub(crate) crashes: u32,
    /// Ranks that die again before all of their group are back.
    pub(crate) relapse: u32,
    /// Replies of a dead executor that still arrive, late and out of order.
    pub(crate) stale: u32,
    /// Outputs delivered once more, later.
    pub(crate) duplicate: u32,
    /// Rows that fail.
    pub(crate) row: u32,
    /// Masks that are late.
    pub(crate) late: u32,
    /// Steps that take very long.
    pub(crate) stall: u32,
    /// Ticks that come late, so that several events meet in one inbox.
    pub(crate) pause: u32,
    /// Ticks before which a day passes.
    pub(crate) jump: u32,
    /// Returns of executors with a smaller pool than before.
    pub(crate) shrink: u32,
    /// Ticks at which the prefix cache is cleared.
    pub(crate) clear: u32,
    /// Steps behind which a link breaks.
    pub(crate) cut: u32,
    /// Of the links that break, those that lose what is sent to the executors, and nothing else until that is noticed.
    pub(crate) half: u32,
    /// Ticks at which a subscriber of KV events goes, or one that has gone comes back; it is there from the start.
    pub(crate) vanish: u32,
    /// Ticks behind which the engine stands still, for seconds.
    pub(crate) still: u32,
    /// Steps behind which executors hang.
    pub(crate) hang: u32,
    /// Ticks at which an operator takes back whatever is called as some request is.
    pub(crate) order: u32,
}

impl Setup {
    /// Draws everything but `planted` from `chance`.
    pub(crate) fn draw(chance: &mut Chance, planted: Planted) -> Self {
        let block_tokens = chance.pick(&[1, 1, 2, 3, 4, 4, 7, 8, 16, 16, 32, 64]);
        let longest = if chance.hits(30) { 2000 } else { 320 };
        let max_model_len = chance.scaled(4, longest).min(block_tokens * 512);
        let least = max_model_len.div_ceil(block_tokens);
        let blocks = match chance.below(6) {
            0 => least,
            1 => least + 1,
            2 => least * 2,
            3 | 4 => least + chance.between(0, least * 4),
            _ => least * 40,
        };
        let blocks = blocks.clamp(4, 512).max(least);
        let vocab_size = chance.pick(&[2, 5, 30, 1000, 50_000]);
        let tokens_per_step = chance.pick(&[1, 2, 3, 5, 16, 40, 64, 100, 300, 1024, 4096]);
        let mut limits = Limits::cpu(max_model_len, vocab_size);
        limits.tokens_per_step = tokens_per_step;
        limits.requests_running = chance.pick(&[1, 2, 3, 5, 8, 20, 64, 200]);
        limits.steps_in_flight = chance.pick(&[1, 1, 2, 2, 2, 3]);
        if chance.hits(300) && block_tokens < max_model_len {
            limits.tokens_per_chunk = Some(chance.between(block_tokens, max_model_len));
        }
        if chance.hits(150) {
            limits.requests_waiting = chance.between(1, 12);
        }
        if chance.hits(100) {
            limits.tokens_waiting = u64::from(chance.between(max_model_len, max_model_len * 8));
        }
        limits.drafts = chance.pick(&[0, 0, 3, 1, 2, 4]);
        limits.histories = limits.drafts == 3; // Some drafters read them; no draw of the seed's.
        limits.mixed = !chance.hits(100);
        limits.loss_timeout_ms = if chance.hits(200) { 300 } else { 1 << 40 };
        let mut engine = EngineConfig::new(limits, kv(chance, block_tokens, blocks, planted));
        engine.replicas = chance.pick(&[1, 1, 1, 1, 2, 3, 4, 8]);
        engine.lockstep = engine.replicas > 1 && chance.hits(500);
        engine.prefill_gate = chance.hits(500);
        engine.routing = chance.pick(&[
            Routing::Prefix,
            Routing::Prefix,
            Routing::LeastTokens,
            Routing::LeastRequests,
            Routing::RoundRobin,
        ]);
        if chance.hits(300) {
            engine.graph_rows = vec![1, 2, 4, 8, 16];
        }
        engine.planted = planted;
        let load = Load::draw(chance, &engine);
        Self { engine, load, faults: Faults::draw(chance), coupled: false, watched: false }
    }

    /// The same, of a group of ranks that step together and die together.
    pub(crate) fn draw_group(chance: &mut Chance, planted: Planted) -> Self {
        let mut setup = Self::draw(chance, planted);
        setup.engine.replicas = chance.pick(&[2, 2, 3, 4, 5, 6, 7, 8, 8, 8]);
        setup.engine.lockstep = true;
        setup.coupled = chance.hits(500);
        setup.load.requests *= 2;
        setup.faults.crash = chance.pick(&[2, 10, 40]);
        setup.faults.relapse = chance.pick(&[0, 300, 1000]);
        setup
    }

    /// The same, of either kind, whose links are slow and break, and whose subscribers vanish.
    pub(crate) fn draw_links(chance: &mut Chance, planted: Planted) -> Self {
        let grouped = chance.hits(400);
        let draw = if grouped { Self::draw_group } else { Self::draw };
        let mut setup = draw(chance, planted);
        setup.load.link_ms = chance.pick(&[0, 5, 40, 200]);
        setup.faults.cut = chance.pick(&[10, 40, 100]);
        setup.faults.half = chance.pick(&[0, 500, 1000]);
        setup.faults.vanish = chance.pick(&[2, 20, 200]);
        setup
    }

    /// Draws what was thought of later, from a stream of its own: worlds that have none of it stay what they were.
    pub(crate) fn draw_later(&mut self, chance: &mut Chance) {
        self.load.namesakes = chance.pick(&[0, 0, 100, 500]);
        if chance.hits(100) {
            self.faults.order = 40;
        }
        if chance.hits(200) {
            self.watched = true;
            self.faults.still = chance.pick(&[0, 10, 40, 100]);
            self.faults.hang = chance.pick(&[0, 20, 60]);
            if chance.hits(400) {
                // Such steps are slow, but no hangs: together with a stall they would look like one.
                (self.load.step_ms, self.faults.stall) = (2_500, 0);
                self.load.gap_ms = 1_000;
            } else if chance.hits(300) {
                self.load.gap_ms = 300;
            }
        }
    }

    /// Positions per block.
    pub(crate) fn block_tokens(&self) -> u32 {
        self.engine.kv.spec.block_tokens
    }

    /// Longest prompt plus answer.
    pub(crate) fn max_model_len(&self) -> u32 {
        self.engine.limits.max_model_len
    }
}

fn kv(chance: &mut Chance, block_tokens: u32, blocks: u32, planted: Planted) -> KvConfig {
    use protocol::{KvGroup, KvKind, KvSpec};
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens, groups: vec![group] };
    let mut kv = KvConfig::new(spec, blocks, [chance.bits(), chance.bits()]);
    kv.caching = !chance.hits(200);
    kv.hash_bits = chance.pick(&[64, 64, 64, 16, 16, 8, 4]);
    kv.events = true;
    // Of the key, so that the draws of a seed stay what they are.
    kv.residency = Share::new([1.0, 0.1, 0.0][(kv.guard_key[1] % 3) as usize]);
    kv.planted = planted;
    kv
}

impl Load {
    fn draw(chance: &mut Chance, engine: &EngineConfig) -> Self {
        let length = engine.limits.max_model_len;
        // About 4,000 tokens a world, so that a seed takes milliseconds.
        let requests = (8_000 / length.max(8)).clamp(6, 160);
        let (prompt, answer) = match chance.below(2) {
            0 => (length - 1, chance.scaled(1, length)),
            _ => (chance.scaled(1, length - 1), length),
        };
        Self {
            requests: chance.between(requests / 3, requests),
            gap_ms: chance.pick(&[0, 0, 1, 3, 10, 50]),
            shared: chance.pick(&[0, 300, 800]),
            continued: chance.pick(&[0, 200, 500]),
            // Masks of large vocabularies would take most of a world's time.
            constrained: match engine.limits.vocab_size {
                0..=1000 => chance.pick(&[0, 200, 700]),
                _ => 0,
            },
            salts: chance.pick(&[0, 0, 1, 3]),
            namesakes: 0,
            priorities: chance.hits(300),
            answer,
            prompt,
            hopeless: chance.pick(&[0, 0, 50, 200]),
            link_ms: chance.pick(&[0, 1, 5]),
            step_ms: chance.pick(&[0, 1, 4]),
        }
    }
}

impl Faults {
    /// Each kind is off in half of the worlds; the rates of the rest vary over an order.
    fn draw(chance: &mut Chance) -> Self {
        let mut rate = |rates: &[u32]| if chance.hits(500) { 0 } else { chance.pick(rates) };
        let crash = rate(&[2, 10, 40]);
        Self {
            abort: rate(&[30, 150, 500]),
            crash,
            crashes: 8,
            relapse: 0,
            stale: rate(&[200, 1000]),
            duplicate: rate(&[10, 100, 300]),
            row: rate(&[1, 5, 20]),
            stall: rate(&[2, 20]),
            pause: rate(&[20, 200]),
            jump: rate(&[0, 0, 0, 1]),
            shrink: rate(&[300, 1000]),
            clear: rate(&[1, 10]),
            late: rate(&[10, 100, 400]),
            cut: 0,
            half: 0,
            vanish: 0,
            still: 0,
            hang: 0,
            order: 0,
        }
    }

    /// Nothing goes wrong any more.
    pub(crate) fn none() -> Self {
        Self::default()
    }
}
