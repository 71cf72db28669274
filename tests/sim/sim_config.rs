//! Configuration of a simulation, drawn from its seed: sizes, limits, load, and fault rates.

use crate::kv_memory::SimKvMemory;
use crate::rng::SimRng;
use protocol::{KvGroup, KvKind, KvSpec};
use scheduler::{KvConfig, LifetimeSampleRate, RoutingPolicy, SchedulerConfig, SchedulerLimits};

/// First seed of simulations with a lockstep group: from this seed on, the replicas are the 2 to 8 ranks of
/// one lockstep group.
pub(crate) const GROUP_SEEDS_FROM: u64 = 1_000_000_000;
/// The XOR of this value and a seed is the seed of a second random number generator, which draws the settings
/// that were added to the simulator later. This value was chosen so that the seeds in `regressions.rs` draw
/// no fault from the second generator.
pub(crate) const LATE_DRAWS_STREAM: u64 = 0x1000_0000_0000_0000;
/// First seed of simulations with broken links and with KV-event subscribers that disconnect.
pub(crate) const LINK_SEEDS_FROM: u64 = 2_000_000_000;
/// First seed of simulations of models with window groups.
pub(crate) const WINDOW_SEEDS_FROM: u64 = 3_000_000_000;

/// First seed of simulations of models with state groups.
pub(crate) const STATE_SEEDS_FROM: u64 = 4_000_000_000;

/// Configuration of a simulation, determined by its seed.
#[derive(Debug, Clone)]
pub(crate) struct SimConfig {
    /// Configuration of the scheduler under test.
    pub(crate) scheduler: SchedulerConfig,
    /// Number, sizes and arrival rate of the requests.
    pub(crate) load: SimLoad,
    /// Rates of the faults that are injected.
    pub(crate) faults: FaultRates,
    /// Whether a rank finishes a step only after all ranks of its group have started the step, as with
    /// collectives.
    pub(crate) coupled_steps: bool,
    /// Whether executors send heartbeats and are declared failed by timeout.
    pub(crate) watch_heartbeats: bool,
    /// Memory of a replica's KV cache.
    pub(crate) kv_memory: SimKvMemory,
}

/// Number, sizes, kinds and arrival rate of the requests. Fields called rates are numbers per 1000 requests.
#[derive(Debug, Clone)]
pub(crate) struct SimLoad {
    /// Number of requests in a simulation.
    pub(crate) requests: u32,
    /// Maximum time between two arrivals in milliseconds.
    pub(crate) gap_ms: u32,
    /// Rate (per 1000) of requests that share a prefix with an earlier request.
    pub(crate) shared: u32,
    /// Rate (per 1000) of requests that continue an earlier request's prompt and output.
    pub(crate) continued: u32,
    /// Rate (per 1000) of requests with grammar bitmasks.
    pub(crate) constrained: u32,
    /// Number of cache salts in use; 0 = none.
    pub(crate) salts: u32,
    /// Rate (per 1000) of requests that have the same client id as an earlier request.
    pub(crate) shared_client_ids: u32,
    /// Whether requests have different priorities.
    pub(crate) priorities: bool,
    /// Maximum requested output length in tokens.
    pub(crate) output_len_max: u32,
    /// Maximum prompt length in tokens. Short prompts with long outputs grow while they run, which causes
    /// preemptions.
    pub(crate) prompt_len_max: u32,
    /// Rate (per 1000) of requests that violate a limit on purpose.
    pub(crate) invalid_requests: u32,
    /// Maximum one-way delay of a link in milliseconds.
    pub(crate) link_ms: u32,
    /// Maximum duration of a step on a device in milliseconds.
    pub(crate) step_ms: u32,
}

/// Rates of faults in a simulation, per 1000; a fault with rate 0 is disabled in this simulation.
#[derive(Debug, Clone, Default)]
pub(crate) struct FaultRates {
    /// Rate (per 1000) of requests that are aborted, at any time; some are aborted twice or after their end.
    pub(crate) abort: u32,
    /// Rate (per 1000) of outputs followed by a crash of their executor.
    pub(crate) crash: u32,
    /// Maximum number of crashes in a simulation.
    pub(crate) max_crashes: u32,
    /// Rate (per 1000) of restored ranks that fail again before all ranks of their group are restored.
    pub(crate) fail_again: u32,
    /// Rate (per 1000) of outputs that a crashed executor had not sent and that still arrive, late and out of
    /// order.
    pub(crate) stale_reply: u32,
    /// Rate (per 1000) of outputs that are delivered twice.
    pub(crate) duplicate_reply: u32,
    /// Rate (per 1000) of rows that fail on the device.
    pub(crate) failed_row: u32,
    /// Rate (per 1000) of grammar bitmasks that are overdue.
    pub(crate) overdue_mask: u32,
    /// Rate (per 1000) of steps that take much longer than other steps.
    pub(crate) slow_step: u32,
    /// Rate (per 1000) of ticks that are delayed, so that several events are in one inbox.
    pub(crate) late_tick: u32,
    /// Rate (per 1000) of ticks before which the clock advances by a day.
    pub(crate) clock_jump: u32,
    /// Rate (per 1000) of restored executors that have a smaller KV pool than the executors that failed.
    pub(crate) smaller_pool: u32,
    /// Rate (per 1000) of ticks at which the prefix cache is cleared.
    pub(crate) clear_prefix_cache: u32,
    /// Rate (per 1000) of steps after which a link breaks.
    pub(crate) broken_link: u32,
    /// Rate (per 1000) of broken links that lose only messages to the executors until the failure is
    /// detected; all other broken links lose messages in both directions.
    pub(crate) one_way_break: u32,
    /// Rate (per 1000) of ticks at which a KV-event subscriber disconnects or, if it is disconnected,
    /// reconnects. Subscribers are connected at the start.
    pub(crate) subscriber_disconnect: u32,
    /// Rate (per 1000) of ticks after which the engine process or some of its threads pause for seconds.
    pub(crate) process_pause: u32,
    /// Rate (per 1000) of steps after which executors hang.
    pub(crate) hang: u32,
    /// Rate (per 1000) of ticks at which an operator aborts all requests that have a randomly chosen client
    /// id.
    pub(crate) abort_by_client_id: u32,
}

impl SimConfig {
    /// Draws the configuration of a simulation from `rng`.
    pub(crate) fn draw(rng: &mut SimRng) -> Self {
        let block_tokens = rng.pick(&[1, 1, 2, 3, 4, 4, 7, 8, 16, 16, 32, 64]);
        let longest = if rng.chance_per_mille(30) { 2000 } else { 320 };
        let max_model_len = rng.scaled(4, longest).min(block_tokens * 512);
        let least = max_model_len.div_ceil(block_tokens);
        let blocks = match rng.below(6) {
            0 => least,
            1 => least + 1,
            2 => least * 2,
            3 | 4 => least + rng.between(0, least * 4),
            _ => least * 40,
        };
        let blocks = blocks.clamp(4, 512).max(least);
        let vocab_size = rng.pick(&[2, 5, 30, 1000, 50_000]);
        let tokens_per_step = rng.pick(&[1, 2, 3, 5, 16, 40, 64, 100, 300, 1024, 4096]);
        let mut limits = SchedulerLimits::cpu(max_model_len, vocab_size);
        limits.tokens_per_step = tokens_per_step;
        limits.max_num_seqs = rng.pick(&[1, 2, 3, 5, 8, 20, 64, 200]);
        limits.steps_in_flight = rng.pick(&[1, 1, 2, 2, 2, 3]);
        if rng.chance_per_mille(300) && block_tokens < max_model_len {
            limits.tokens_per_chunk = Some(rng.between(block_tokens, max_model_len));
        }
        if rng.chance_per_mille(150) {
            limits.max_waiting_requests = rng.between(1, 12);
        }
        if rng.chance_per_mille(100) {
            limits.max_waiting_tokens = u64::from(rng.between(max_model_len, max_model_len * 8));
        }
        limits.draft_tokens = rng.pick(&[0, 0, 3, 1, 2, 4]);
        // Some draft token proposers need the token history. This setting is derived from `draft_tokens`
        // instead of drawn, because an additional draw would change the later draws of every seed.
        limits.needs_token_history = limits.draft_tokens == 3;
        // Derived for the same reason.
        limits.max_step_ms = (max_model_len % 4 == 1).then_some(1 + tokens_per_step % 3);
        limits.mixed_batches = !rng.chance_per_mille(100);
        limits.failure_timeout_ms = if rng.chance_per_mille(200) { 300 } else { 1 << 40 };
        let mut engine = SchedulerConfig::new(limits, kv_config(rng, block_tokens, blocks));
        engine.replicas = rng.pick(&[1, 1, 1, 1, 2, 3, 4, 8]);
        engine.lockstep = engine.replicas > 1 && rng.chance_per_mille(500);
        engine.prefill_gate = rng.chance_per_mille(500);
        engine.routing = rng.pick(&[
            RoutingPolicy::Prefix,
            RoutingPolicy::Prefix,
            RoutingPolicy::LeastTokens,
            RoutingPolicy::LeastRequests,
            RoutingPolicy::RoundRobin,
        ]);
        if rng.chance_per_mille(300) {
            engine.capture_sizes = vec![1, 2, 4, 8, 16];
        }
        let load = SimLoad::draw(rng, &engine);
        Self {
            scheduler: engine,
            load,
            faults: FaultRates::draw(rng),
            coupled_steps: false,
            watch_heartbeats: false,
            kv_memory: SimKvMemory::default(),
        }
    }

    /// Draws the configuration of a simulation of one group of ranks that step in lockstep and fail together.
    pub(crate) fn draw_group(rng: &mut SimRng) -> Self {
        let mut config = Self::draw(rng);
        config.scheduler.replicas = rng.pick(&[2, 2, 3, 4, 5, 6, 7, 8, 8, 8]);
        config.scheduler.lockstep = true;
        config.coupled_steps = rng.chance_per_mille(500);
        config.load.requests *= 2;
        config.faults.crash = rng.pick(&[2, 10, 40]);
        config.faults.fail_again = rng.pick(&[0, 300, 1000]);
        config
    }

    /// Draws the configuration of a simulation, with or without a lockstep group, with slow and broken links
    /// and with KV-event subscribers that disconnect.
    pub(crate) fn draw_links(rng: &mut SimRng) -> Self {
        let grouped = rng.chance_per_mille(400);
        let draw = if grouped { Self::draw_group } else { Self::draw };
        let mut config = draw(rng);
        config.load.link_ms = rng.pick(&[0, 5, 40, 200]);
        config.faults.broken_link = rng.pick(&[10, 40, 100]);
        config.faults.one_way_break = rng.pick(&[0, 500, 1000]);
        config.faults.subscriber_disconnect = rng.pick(&[2, 20, 200]);
        config
    }

    /// Draws the configuration of a simulation of a model with window groups, with or without a lockstep group and
    /// broken links.
    pub(crate) fn draw_windows(rng: &mut SimRng) -> Self {
        let draws =
            [Self::draw, Self::draw, Self::draw, Self::draw, Self::draw_group, Self::draw_links];
        let draw = rng.pick(&draws);
        let mut config = draw(rng);
        let (size, longest) = (config.block_tokens(), config.max_model_len());
        // Groups with the fewest blocks for their window: rows begin and end at each offset within a block.
        let kept = rng.pick(&[1, 1, 1, 1, 2, 0]);
        let windows = rng.between(1, 3);
        let mut window = || {
            let tokens = match rng.below(6) {
                0 => 2,
                1 => size,
                2 => size + 1,
                3 => size * rng.between(1, 4),
                4 => rng.scaled(1, longest),
                _ => longest,
            };
            // Without a group that keeps all positions, the hash model reads its context from the last position.
            KvKind::Window { tokens: tokens.max(2) }
        };
        let kinds: Vec<_> = (0..kept).map(|_| KvKind::Full).collect();
        let kinds = kinds.into_iter().chain((0..windows).map(|_| window()));
        let group = |kind| KvGroup { layers: vec![0], kind, bytes_per_block: 1 };
        let kv = &mut config.scheduler.kv;
        let pools = kv.blocks / longest.div_ceil(size);
        kv.spec.groups = kinds.map(group).collect();
        if kept == 0 {
            // The subscriber cannot distinguish the parents of blocks with colliding hashes.
            kv.hash_bits = 64;
        }
        let least = config.blocks_of_request(longest);
        config.scheduler.kv.blocks = match rng.below(4) {
            0 => least,
            1 => least + rng.between(0, least),
            _ => least.saturating_mul(pools.max(1)).clamp(least, least.max(1024)),
        };
        config
    }

    /// Draws the configuration of a simulation of a model with state groups, with or without window groups, a lockstep
    /// group and broken links.
    pub(crate) fn draw_states(rng: &mut SimRng) -> Self {
        let mut config = Self::draw_windows(rng);
        let (size, longest) = (config.block_tokens(), config.max_model_len());
        let groups = &mut config.scheduler.kv.spec.groups;
        if groups[0].kind.window().is_some() || rng.chance_per_mille(600) {
            groups.truncate(1);
            groups[0].kind = KvKind::Full;
        }
        groups.truncate(3);
        for _ in 0..rng.pick(&[1, 1, 1, 2]).min(4 - groups.len()) {
            let kind = KvKind::State { slots_per_request: 1, bytes_per_slot: 8 };
            groups.push(KvGroup { layers: vec![1], kind, bytes_per_block: 0 });
        }
        let least = config.blocks_of_request(longest);
        config.scheduler.kv.blocks = config.scheduler.kv.blocks.max(least);
        let limits = &mut config.scheduler.limits;
        limits.state_checkpoint_tokens = match rng.below(6) {
            0 => 0,
            1 => 1,
            2 => size * rng.between(1, 4),
            3 => 8_192,
            _ => rng.scaled(1, longest),
        };
        let rows = limits.max_num_seqs.min(32);
        config.scheduler.kv.state_slots = match rng.below(5) {
            0 => 3,
            1 => rng.between(3, 8),
            2 => rows + 3,
            3 => 2 * rows + 3,
            _ => rng.between(3, 4 * rows + 3),
        };
        config
    }

    /// Draws the settings that were added to the simulator later. They use a separate random number
    /// generator, so that simulations in which these settings are disabled stay unchanged.
    pub(crate) fn draw_late_additions(&mut self, rng: &mut SimRng) {
        self.load.shared_client_ids = rng.pick(&[0, 0, 100, 500]);
        if rng.chance_per_mille(100) {
            self.faults.abort_by_client_id = 40;
        }
        if rng.chance_per_mille(200) {
            self.watch_heartbeats = true;
            self.faults.process_pause = rng.pick(&[0, 10, 40, 100]);
            self.faults.hang = rng.pick(&[0, 20, 60]);
            if rng.chance_per_mille(400) {
                // A step may take up to 2.5 s and must not be detected as a hang. The `slow_step` fault is
                // disabled, because its additional delay would exceed the step timeout.
                (self.load.step_ms, self.faults.slow_step) = (2_500, 0);
                self.load.gap_ms = 1_000;
            } else if rng.chance_per_mille(300) {
                self.load.gap_ms = 300;
            }
        }
    }

    /// Number of positions per KV block.
    pub(crate) fn block_tokens(&self) -> u32 {
        self.scheduler.kv.spec.block_tokens
    }

    /// Kinds of the KV groups.
    pub(crate) fn kv_kinds(&self) -> impl Iterator<Item = KvKind> {
        self.scheduler.kv.spec.groups.iter().map(|group| group.kind)
    }

    /// Maximum number of blocks that a request of `len` tokens holds at a time.
    pub(crate) fn blocks_of_request(&self, len: u32) -> u32 {
        let in_flight = self.scheduler.limits.request_tokens_in_flight();
        self.scheduler.kv.spec.blocks_of_request(len, in_flight)
    }

    /// Maximum total length of prompt and output in tokens.
    pub(crate) fn max_model_len(&self) -> u32 {
        self.scheduler.limits.max_model_len
    }
}

fn kv_config(rng: &mut SimRng, block_tokens: u32, blocks: u32) -> KvConfig {
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens, groups: vec![group] };
    let mut kv = KvConfig::new(spec, blocks, [rng.next_u64(), rng.next_u64()]);
    kv.caching = !rng.chance_per_mille(200);
    kv.hash_bits = rng.pick(&[64, 64, 64, 16, 16, 8, 4]);
    kv.events = true;
    // The sample rate is derived from the guard key, which is random. An additional draw would change the
    // later draws of every seed.
    kv.lifetime_sample = LifetimeSampleRate::new([1.0, 0.1, 0.0][(kv.guard_key[1] % 3) as usize]);
    kv
}

impl SimLoad {
    fn draw(rng: &mut SimRng, engine: &SchedulerConfig) -> Self {
        let length = engine.limits.max_model_len;
        // A simulation has about 4,000 tokens, so that it takes milliseconds.
        let requests = (8_000 / length.max(8)).clamp(6, 160);
        let (prompt, output) = match rng.below(2) {
            0 => (length - 1, rng.scaled(1, length)),
            _ => (rng.scaled(1, length - 1), length),
        };
        Self {
            requests: rng.between(requests / 3, requests),
            gap_ms: rng.pick(&[0, 0, 1, 3, 10, 50]),
            shared: rng.pick(&[0, 300, 800]),
            continued: rng.pick(&[0, 200, 500]),
            // Building bitmasks for large vocabularies would take most of the simulation's run time.
            constrained: match engine.limits.vocab_size {
                0..=1000 => rng.pick(&[0, 200, 700]),
                _ => 0,
            },
            salts: rng.pick(&[0, 0, 1, 3]),
            shared_client_ids: 0,
            priorities: rng.chance_per_mille(300),
            output_len_max: output,
            prompt_len_max: prompt,
            invalid_requests: rng.pick(&[0, 0, 50, 200]),
            link_ms: rng.pick(&[0, 1, 5]),
            step_ms: rng.pick(&[0, 1, 4]),
        }
    }
}

impl FaultRates {
    /// Draws the fault rates. Each kind of fault is disabled in half of the simulations; the rates vary over
    /// an order of magnitude.
    fn draw(rng: &mut SimRng) -> Self {
        let mut rate = |rates: &[u32]| if rng.chance_per_mille(500) { 0 } else { rng.pick(rates) };
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

    /// Rates of a simulation without faults.
    pub(crate) fn none() -> Self {
        Self::default()
    }
}
