//! What a seed decides before the first event: sizes, limits, and which faults happen how often.

use crate::rng::SimRng;
use scheduler::{
    FaultInjection, KvConfig, RoutingPolicy, SampleRate, SchedulerConfig, SchedulerLimits,
};

/// Seeds from here on draw worlds whose replicas are a group of 2 to 8 ranks that step together.
pub(crate) const GROUP_SEEDS_FROM: u64 = 1_000_000_000;
/// What sets the stream of later draws apart from a seed's own; under this one the seeds of `regressions.rs` draw no fault.
pub(crate) const LATE_DRAWS_STREAM: u64 = 0x1000_0000_0000_0000;
/// Seeds from here on draw worlds whose links break and whose KV-event subscribers come and go.
pub(crate) const LINK_SEEDS_FROM: u64 = 2_000_000_000;

/// The drawn configuration of a world.
#[derive(Debug, Clone)]
pub(crate) struct SimConfig {
    /// The engine's configuration.
    pub(crate) scheduler: SchedulerConfig,
    /// How requests look and arrive.
    pub(crate) load: SimLoad,
    /// What goes wrong.
    pub(crate) faults: FaultRates,
    /// Whether a step of a rank ends only once all ranks of its group have begun theirs, as collectives make it.
    pub(crate) coupled_steps: bool,
    /// Whether executors give signs of life, and are given up for want of them.
    pub(crate) watch_heartbeats: bool,
}

/// How requests look and arrive.
#[derive(Debug, Clone)]
pub(crate) struct SimLoad {
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
    pub(crate) shared_client_ids: u32,
    /// Whether priorities differ.
    pub(crate) priorities: bool,
    /// Longest answer asked for.
    pub(crate) output_len_max: u32,
    /// Longest prompt. Short prompts with long answers grow while they run: the food of preemption.
    pub(crate) prompt_len_max: u32,
    /// Requests in 1000 that break a limit on purpose.
    pub(crate) invalid_requests: u32,
    /// Longest one-way delay of a link.
    pub(crate) link_ms: u32,
    /// Longest step on a device.
    pub(crate) step_ms: u32,
}

/// Rates of faults, in 1000 unless named otherwise; 0 = switched off for this seed.
#[derive(Debug, Clone, Default)]
pub(crate) struct FaultRates {
    /// Requests aborted at some time, also twice and after their end.
    pub(crate) abort: u32,
    /// Outputs followed by the death of their executor, and how many deaths at most.
    pub(crate) crash: u32,
    /// Deaths at most.
    pub(crate) max_crashes: u32,
    /// Ranks that die again before all of their group are back.
    pub(crate) fail_again: u32,
    /// Replies of a dead executor that still arrive, late and out of order.
    pub(crate) stale_reply: u32,
    /// Outputs delivered once more, later.
    pub(crate) duplicate_reply: u32,
    /// Rows that fail.
    pub(crate) failed_row: u32,
    /// Masks that are late.
    pub(crate) overdue_mask: u32,
    /// Steps that take very long.
    pub(crate) slow_step: u32,
    /// Ticks that come late, so that several events meet in one inbox.
    pub(crate) late_tick: u32,
    /// Ticks before which a day passes.
    pub(crate) clock_jump: u32,
    /// Returns of executors with a smaller pool than before.
    pub(crate) smaller_pool: u32,
    /// Ticks at which the prefix cache is cleared.
    pub(crate) clear_prefix_cache: u32,
    /// Steps behind which a link breaks.
    pub(crate) broken_link: u32,
    /// Of the links that break, those that lose what is sent to the executors, and nothing else until that is noticed.
    pub(crate) one_way_break: u32,
    /// Ticks at which a subscriber of KV events goes, or one that has gone comes back; it is there from the start.
    pub(crate) subscriber_disconnect: u32,
    /// Ticks behind which the engine stands still, for seconds.
    pub(crate) process_pause: u32,
    /// Steps behind which executors hang.
    pub(crate) hang: u32,
    /// Ticks at which an operator takes back whatever is called as some request is.
    pub(crate) abort_by_client_id: u32,
}

impl SimConfig {
    /// Draws everything but `planted` from `chance`.
    pub(crate) fn draw(chance: &mut SimRng, planted: FaultInjection) -> Self {
        let block_tokens = chance.pick(&[1, 1, 2, 3, 4, 4, 7, 8, 16, 16, 32, 64]);
        let longest = if chance.chance_per_mille(30) { 2000 } else { 320 };
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
        let mut limits = SchedulerLimits::cpu(max_model_len, vocab_size);
        limits.tokens_per_step = tokens_per_step;
        limits.max_num_seqs = chance.pick(&[1, 2, 3, 5, 8, 20, 64, 200]);
        limits.steps_in_flight = chance.pick(&[1, 1, 2, 2, 2, 3]);
        if chance.chance_per_mille(300) && block_tokens < max_model_len {
            limits.tokens_per_chunk = Some(chance.between(block_tokens, max_model_len));
        }
        if chance.chance_per_mille(150) {
            limits.max_waiting_requests = chance.between(1, 12);
        }
        if chance.chance_per_mille(100) {
            limits.max_waiting_tokens = u64::from(chance.between(max_model_len, max_model_len * 8));
        }
        limits.draft_tokens = chance.pick(&[0, 0, 3, 1, 2, 4]);
        limits.needs_token_history = limits.draft_tokens == 3; // Some drafters read them; no draw of the seed's.
        limits.mixed_batches = !chance.chance_per_mille(100);
        limits.failure_timeout_ms = if chance.chance_per_mille(200) { 300 } else { 1 << 40 };
        let mut engine =
            SchedulerConfig::new(limits, kv_config(chance, block_tokens, blocks, planted));
        engine.replicas = chance.pick(&[1, 1, 1, 1, 2, 3, 4, 8]);
        engine.lockstep = engine.replicas > 1 && chance.chance_per_mille(500);
        engine.prefill_gate = chance.chance_per_mille(500);
        engine.routing = chance.pick(&[
            RoutingPolicy::Prefix,
            RoutingPolicy::Prefix,
            RoutingPolicy::LeastTokens,
            RoutingPolicy::LeastRequests,
            RoutingPolicy::RoundRobin,
        ]);
        if chance.chance_per_mille(300) {
            engine.capture_sizes = vec![1, 2, 4, 8, 16];
        }
        engine.fault_injection = planted;
        let load = SimLoad::draw(chance, &engine);
        Self {
            scheduler: engine,
            load,
            faults: FaultRates::draw(chance),
            coupled_steps: false,
            watch_heartbeats: false,
        }
    }

    /// The same, of a group of ranks that step together and die together.
    pub(crate) fn draw_group(chance: &mut SimRng, planted: FaultInjection) -> Self {
        let mut setup = Self::draw(chance, planted);
        setup.scheduler.replicas = chance.pick(&[2, 2, 3, 4, 5, 6, 7, 8, 8, 8]);
        setup.scheduler.lockstep = true;
        setup.coupled_steps = chance.chance_per_mille(500);
        setup.load.requests *= 2;
        setup.faults.crash = chance.pick(&[2, 10, 40]);
        setup.faults.fail_again = chance.pick(&[0, 300, 1000]);
        setup
    }

    /// The same, of either kind, whose links are slow and break, and whose subscribers vanish.
    pub(crate) fn draw_links(chance: &mut SimRng, planted: FaultInjection) -> Self {
        let grouped = chance.chance_per_mille(400);
        let draw = if grouped { Self::draw_group } else { Self::draw };
        let mut setup = draw(chance, planted);
        setup.load.link_ms = chance.pick(&[0, 5, 40, 200]);
        setup.faults.broken_link = chance.pick(&[10, 40, 100]);
        setup.faults.one_way_break = chance.pick(&[0, 500, 1000]);
        setup.faults.subscriber_disconnect = chance.pick(&[2, 20, 200]);
        setup
    }

    /// Draws what was thought of later, from a stream of its own: worlds that have none of it stay what they were.
    pub(crate) fn draw_late_additions(&mut self, chance: &mut SimRng) {
        self.load.shared_client_ids = chance.pick(&[0, 0, 100, 500]);
        if chance.chance_per_mille(100) {
            self.faults.abort_by_client_id = 40;
        }
        if chance.chance_per_mille(200) {
            self.watch_heartbeats = true;
            self.faults.process_pause = chance.pick(&[0, 10, 40, 100]);
            self.faults.hang = chance.pick(&[0, 20, 60]);
            if chance.chance_per_mille(400) {
                // Such steps are slow, but no hangs: together with a stall they would look like one.
                (self.load.step_ms, self.faults.slow_step) = (2_500, 0);
                self.load.gap_ms = 1_000;
            } else if chance.chance_per_mille(300) {
                self.load.gap_ms = 300;
            }
        }
    }

    /// Positions per block.
    pub(crate) fn block_tokens(&self) -> u32 {
        self.scheduler.kv.spec.block_tokens
    }

    /// Longest prompt plus answer.
    pub(crate) fn max_model_len(&self) -> u32 {
        self.scheduler.limits.max_model_len
    }
}

fn kv_config(
    chance: &mut SimRng,
    block_tokens: u32,
    blocks: u32,
    planted: FaultInjection,
) -> KvConfig {
    use protocol::{KvGroup, KvKind, KvSpec};
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens, groups: vec![group] };
    let mut kv = KvConfig::new(spec, blocks, [chance.next_u64(), chance.next_u64()]);
    kv.caching = !chance.chance_per_mille(200);
    kv.hash_bits = chance.pick(&[64, 64, 64, 16, 16, 8, 4]);
    kv.events = true;
    // Of the key, so that the draws of a seed stay what they are.
    kv.lifetime_sample = SampleRate::new([1.0, 0.1, 0.0][(kv.guard_key[1] % 3) as usize]);
    kv.fault_injection = planted;
    kv
}

impl SimLoad {
    fn draw(chance: &mut SimRng, engine: &SchedulerConfig) -> Self {
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
            shared_client_ids: 0,
            priorities: chance.chance_per_mille(300),
            output_len_max: answer,
            prompt_len_max: prompt,
            invalid_requests: chance.pick(&[0, 0, 50, 200]),
            link_ms: chance.pick(&[0, 1, 5]),
            step_ms: chance.pick(&[0, 1, 4]),
        }
    }
}

impl FaultRates {
    /// Each kind is off in half of the worlds; the rates of the rest vary over an order.
    fn draw(chance: &mut SimRng) -> Self {
        let mut rate =
            |rates: &[u32]| if chance.chance_per_mille(500) { 0 } else { chance.pick(rates) };
        let crash = rate(&[2, 10, 40]);
        Self {
            abort: rate(&[30, 150, 500]),
            crash,
            max_crashes: 8,
            fail_again: 0,
            stale_reply: rate(&[200, 1000]),
            duplicate_reply: rate(&[10, 100, 300]),
            failed_row: rate(&[1, 5, 20]),
            slow_step: rate(&[2, 20]),
            late_tick: rate(&[20, 200]),
            clock_jump: rate(&[0, 0, 0, 1]),
            smaller_pool: rate(&[300, 1000]),
            clear_prefix_cache: rate(&[1, 10]),
            overdue_mask: rate(&[10, 100, 400]),
            broken_link: 0,
            one_way_break: 0,
            subscriber_disconnect: 0,
            process_pause: 0,
            hang: 0,
            abort_by_client_id: 0,
        }
    }

    /// Nothing goes wrong any more.
    pub(crate) fn none() -> Self {
        Self::default()
    }
}
