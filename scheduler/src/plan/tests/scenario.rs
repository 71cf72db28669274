//! Scenarios of planner tests: their text form, and the scheduling state that they describe.

use super::*;

/// Scenario of a planner test: scheduling state, KV cache and limits.
pub(super) struct PlanScenario {
    pub(super) state: ReplicaRequests,
    pub(super) kv: KvCache,
    pub(super) limits: SchedulerLimits,
    /// Block tables that hold surplus blocks: running requests that share prefixes need fewer blocks, and
    /// without these tables more blocks would be free than the scenario's `free`.
    pub(super) parked_blocks: BlockTables,
}

/// A request parsed from a scenario, for example `b=a 4/9`: its name, the request whose tokens it has,
/// whether it is non-preemptible, and its numbers of computed and known tokens.
pub(super) struct ScenarioRequest {
    pub(super) name: u8,
    pub(super) same_tokens_as: u8,
    pub(super) computed: u32,
    pub(super) known_len: u32,
    pub(super) non_preemptible: bool,
}

pub(super) fn tokens(token_source: u8, count: u32) -> Vec<Token> {
    (0..count).map(|i| u32::from(token_source) * 1_000 + i).collect()
}

pub(super) fn parse_request(text: &str) -> ScenarioRequest {
    let (label, numbers) = text.trim().split_once(' ').expect("`name numbers`");
    let (computed, known_len) = numbers.split_once('/').unwrap_or(("0", numbers));
    let number = |text: &str| text.parse().expect("a number");
    let name = label.as_bytes()[0];
    let token_source =
        label.split_once('=').map_or(name, |(_, token_source)| token_source.as_bytes()[0]);
    let non_preemptible = label.contains('!');
    ScenarioRequest {
        name,
        same_tokens_as: token_source,
        computed: number(computed),
        known_len: number(known_len),
        non_preemptible,
    }
}

fn parse_section<'a>(text: &'a str, name: &str) -> impl Iterator<Item = ScenarioRequest> + use<'a> {
    let section = text.split('|').find_map(|section| section.trim().strip_prefix(name));
    section.unwrap_or("").split(',').filter(|entry| !entry.trim().is_empty()).map(parse_request)
}

fn parse_setting(text: &str, name: &str) -> Option<u32> {
    let settings = text.split('|').next()?;
    let value = settings.split_whitespace().find_map(|word| word.strip_prefix(name))?;
    Some(value.parse().expect("a number"))
}

fn parse_limits(text: &str) -> SchedulerLimits {
    let mut limits = SchedulerLimits::cpu(10_000, u32::MAX);
    limits.tokens_per_step = parse_setting(text, "step=").unwrap_or(64);
    limits.tokens_per_chunk = parse_setting(text, "chunk=");
    limits.max_num_seqs = parse_setting(text, "slots=").unwrap_or(16);
    limits.draft_tokens = parse_setting(text, "drafts=").unwrap_or(0) as u8;
    limits
}

pub(super) fn scenario(text: &str) -> PlanScenario {
    let block_tokens = parse_setting(text, "block=").unwrap_or(4);
    let limits = parse_limits(text);
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens, groups: vec![group] };
    let blocks_in_use: u32 =
        parse_section(text, "run").map(|r| running_blocks(&r, block_tokens)).sum();
    let cached: u32 = parse_section(text, "cache").map(|c| c.known_len / block_tokens).sum();
    let blocks = blocks_in_use + cached + parse_setting(text, "free=").unwrap_or(100);
    let config = KvConfig::new(spec, blocks, [1, 2]);
    let mut scenario = PlanScenario {
        state: ReplicaRequests::new(Replica(0), limits.max_num_seqs, &config),
        kv: KvCache::new(&config).unwrap(),
        limits,
        parked_blocks: BlockTables::default(),
    };
    let config = SchedulerConfig::new(scenario.limits.clone(), config);
    for cached in parse_section(text, "cache") {
        let len = cached.known_len;
        let mut tables = scenario.fill(&tokens(cached.same_tokens_as, len), len);
        scenario.kv.free(&mut tables);
    }
    for (arrival, entry) in parse_section(text, "run").enumerate() {
        scenario.run(&entry, arrival as u64, &config);
    }
    let saved = scenario.kv.available_blocks() - (blocks - blocks_in_use);
    scenario.kv.grow(&mut scenario.parked_blocks, TableEntries::all(saved));
    for (arrival, entry) in parse_section(text, "wait").enumerate() {
        scenario.state.enqueue(request(&entry, 100 + arrival as u64, &config));
    }
    scenario
}

/// Returns the number of blocks that a running request holds: for its known length, or for its computed
/// length if it decodes.
fn running_blocks(entry: &ScenarioRequest, block_tokens: u32) -> u32 {
    let decodes = entry.known_len - entry.computed == 1;
    let positions = if decodes { entry.computed } else { entry.known_len };
    positions.div_ceil(block_tokens)
}

pub(super) fn request(entry: &ScenarioRequest, arrival: u64, config: &SchedulerConfig) -> Request {
    let tokens = tokens(entry.same_tokens_as, entry.known_len);
    let submit =
        RequestSubmission::greedy(u64::from(entry.name), tokens, &config.kv.block_hasher());
    let mut request = Request::new(submit, arrival, 0, config);
    request.cold_fields.queue_key = QueueKey { priority: 0, arrival };
    request.non_preemptible = entry.non_preemptible;
    request
}

impl PlanScenario {
    /// Allocates a block table for `tokens` and registers its full blocks below position `computed` in the
    /// prefix cache.
    pub(super) fn fill(&mut self, tokens: &[Token], computed: u32) -> BlockTables {
        let mut keys = Vec::new();
        self.state.hasher.extend_keys(&mut keys, tokens, None);
        let mut tables = BlockTables::default();
        let entries = self.kv.blocks_for(tokens.len() as u32);
        self.kv.grow(&mut tables, TableEntries::all(entries));
        for index in 0..computed / self.kv.block_tokens() {
            let content = SequenceContent { tokens, block_keys: &keys, extra_keys: None };
            assert_ne!(
                self.kv.publish(&mut tables, 0, index, content),
                PrefixCacheInsertOutcome::Rejected
            );
        }
        tables
    }

    fn run(&mut self, entry: &ScenarioRequest, arrival: u64, config: &SchedulerConfig) {
        let mut request = request(entry, arrival, config);
        let blocks = running_blocks(entry, self.kv.block_tokens());
        let positions = (blocks * self.kv.block_tokens()).min(entry.known_len) as usize;
        request.cold_fields.block_tables =
            self.fill(&request.tokens()[..positions], entry.computed);
        request.block_count = blocks;
        request.computed_tokens = entry.computed;
        request.slot_has_drafts = true;
        request.seq_slot = Some(self.state.take_sequence_slot());
        if entry.non_preemptible {
            request.reserved_blocks = self.kv.blocks_for(request.limit) - blocks;
            self.state.reserved_blocks += request.reserved_blocks;
        }
        let key = request.cold_fields.queue_key;
        let slot = self.state.requests.insert(request);
        self.state.running.insert(key, slot);
    }

    pub(super) fn name(&self, slot: SlabSlot) -> char {
        char::from(self.state.requests[slot].id.0 as u8)
    }

    pub(super) fn render(&self, plan: &StepPlan) -> String {
        let mut words = Vec::new();
        if !plan.rows.is_empty() {
            words.push("run".to_owned());
        }
        for row in &plan.rows {
            let drafts = if row.drafts > 0 { format!("+{}", row.drafts) } else { String::new() };
            let (name, end) = (self.name(row.slot), row.start + row.len);
            words.push(format!("{name}[{},{end}){drafts}", row.start));
        }
        if !plan.preempt.is_empty() {
            words.push("preempt".to_owned());
        }
        words.extend(plan.preempt.iter().map(|&slot| self.name(slot).to_string()));
        if !plan.admit.is_empty() {
            words.push("admit".to_owned());
        }
        words.extend(plan.admit.iter().map(|admit| self.name(admit.slot).to_string()));
        if plan.blocked_head.is_some() {
            words.push("blocked".to_owned());
        }
        words.join(" ")
    }
}
