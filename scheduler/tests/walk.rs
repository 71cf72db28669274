//! Random walks of the whole engine against a device that reads tokens back through block tables.
//!
//! The device stores token ids in the slots a batch names and produces a hash of the whole prefix it
//! reads back, so an aliased, stale or misplaced block shows as a wrong token at once. Small
//! sibling of `tests/sim`, without faults: it answers within seconds while this crate is edited.

use protocol::{
    Batch, BlockId, Input, KvGroup, KvKind, KvSpec, Replica, RequestId, Row, RowOutput, Sampling,
    StepOutput, StepTiming, Token, Tokens,
};
use scheduler::{
    AbortCause, Effect, Engine, EngineConfig, Event, Finish, KvConfig, Limits, Planted, Submit,
    TokenEvent,
};
use std::collections::{BTreeMap, VecDeque};

const VOCAB: u32 = 64;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In `[low, high)`.
    fn draw(&mut self, low: u32, high: u32) -> u32 {
        low + (self.next() % u64::from(high - low)) as u32
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.draw(0, from.len() as u32) as usize]
    }
}

/// The token behind `prefix`.
fn successor(prefix: &[Token]) -> Token {
    let fold =
        |h: u64, &t: &Token| (h ^ u64::from(t)).wrapping_mul(0x100_0000_01b3).rotate_left(23);
    (prefix.iter().fold(0xcbf2_9ce4_8422_2325, fold) >> 11) as u32 % VOCAB
}

#[derive(Default)]
struct SeatState {
    table: Vec<BlockId>,
    next: u32,
    last: Token,
}

/// One replica's executor: position and token per slot of its pool.
struct Device {
    block_tokens: u32,
    slots: Vec<Option<(u32, Token)>>,
    seats: BTreeMap<u32, SeatState>,
    answers: VecDeque<StepOutput>,
}

impl Device {
    fn run(&mut self, batch: &Batch, random: &mut Random) {
        let rows = batch.rows.iter().map(|row| self.run_row(row, random)).collect();
        let (timing, experts) = (StepTiming::default(), Vec::new());
        let (step, epoch) = (batch.step, batch.epoch);
        self.answers.push_back(StepOutput { step, epoch, rows, timing, experts });
    }

    fn run_row(&mut self, row: &Row, random: &mut Random) -> RowOutput {
        let seat = self.seats.entry(row.seat.0).or_default();
        if row.init.is_some() {
            *seat = SeatState::default();
        }
        for update in &row.tables {
            seat.table.truncate(update.from as usize);
            assert_eq!(seat.table.len(), update.from as usize, "a table update leaves a gap");
            seat.table.extend(&update.blocks);
        }
        let (start, tokens) = match &row.input {
            Input::Tokens(tokens) => (row.start, tokens.clone()),
            Input::SampledAt { .. } => (seat.next, Tokens::one(seat.last)),
        };
        let furthest = row.start + row.input.slack();
        assert!((row.start..=furthest).contains(&start), "{start} {} {furthest}", row.start);
        let (table, block_tokens) = (seat.table.clone(), self.block_tokens);
        let slot = |p: u32| {
            (table[(p / block_tokens) as usize].0 * block_tokens + p % block_tokens) as usize
        };
        for (position, &token) in (start..).zip(&tokens) {
            self.slots[slot(position)] = Some((position, token));
        }
        if !row.samples {
            return RowOutput::default();
        }
        let end = start + row.len;
        let read = |position: u32| {
            let (at, token) = self.slots[slot(position)].expect("a slot was written");
            assert_eq!(at, position, "a slot holds another position");
            token
        };
        let mut prefix: Vec<Token> = (0..end).map(read).collect();
        let mut drafted = prefix.clone();
        for _ in 0..row.drafts {
            let wrong = u32::from(random.draw(0, 3) == 0);
            let draft = (successor(&drafted) + wrong) % VOCAB;
            self.slots[slot(drafted.len() as u32)] = Some((drafted.len() as u32, draft));
            drafted.push(draft);
        }
        let mut result = RowOutput { drafted: row.drafts, ..RowOutput::default() };
        loop {
            let token = successor(&prefix);
            result.emitted.push(token);
            if drafted.get(prefix.len()) != Some(&token) {
                break;
            }
            result.accepted += 1;
            prefix.push(token);
        }
        let seat = self.seats.get_mut(&row.seat.0).expect("made above");
        (seat.next, seat.last) =
            (end + u32::from(result.accepted), result.emitted[result.emitted.len() - 1]);
        result
    }
}

struct World {
    engine: Engine,
    random: Random,
    devices: Vec<Device>,
    inbox: Vec<Event>,
    got: BTreeMap<RequestId, (Vec<Token>, Option<Finish>)>,
    config: EngineConfig,
}

fn config(random: &mut Random) -> EngineConfig {
    let block_tokens = random.pick(&[1, 2, 3, 4, 8, 16]);
    let max_model_len: u32 = random.pick(&[40, 80]);
    let least = max_model_len.div_ceil(block_tokens);
    let blocks = random.pick(&[least, least + 1, 2 * least, 4 * least, 30 * least]);
    let mut limits = Limits::cpu(max_model_len, VOCAB);
    limits.tokens_per_step = random.pick(&[1, 2, 5, 16, 40, 100, 300]);
    limits.requests_running = random.pick(&[1, 3, 8, 20]);
    limits.tokens_per_chunk = random.pick(&[None, None, Some(block_tokens), Some(40)]);
    limits.steps_in_flight = random.pick(&[1, 2]);
    limits.drafts = random.pick(&[0, 0, 1, 2, 4]);
    limits.mixed = random.draw(0, 5) > 0;
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens, groups: vec![group] };
    let mut kv = KvConfig::new(spec, blocks, [1, 2]);
    kv.caching = random.draw(0, 4) > 0;
    kv.hash_bits = random.pick(&[64, 16, 4]);
    let mut config = EngineConfig::new(limits, kv);
    config.replicas = random.pick(&[1, 1, 2, 4]) as u16;
    config.lockstep = random.draw(0, 2) == 0;
    config.graph_rows = vec![1, 2, 4, 8];
    config
}

impl World {
    fn new(seed: u64, planted: Planted) -> Self {
        let mut random = Random(seed);
        let config = EngineConfig { planted, ..config(&mut random) };
        let (blocks, block_tokens) = (config.kv.blocks, config.kv.spec.block_tokens);
        let device = |_| Device {
            block_tokens,
            slots: vec![None; (blocks * block_tokens) as usize],
            seats: BTreeMap::new(),
            answers: VecDeque::new(),
        };
        let devices = (0..config.replicas).map(device).collect();
        let engine = Engine::new(config.clone()).expect("drawn within limits");
        Self { engine, random, devices, inbox: Vec::new(), got: BTreeMap::new(), config }
    }

    fn submit(&mut self, id: u64, tokens: Vec<Token>, max_tokens: u32, stop_ids: Vec<Token>) {
        let keys = self.engine.hasher().hash(&tokens, None);
        let submit = Submit {
            id: RequestId(id),
            tokens,
            max_tokens,
            sampling: Sampling::greedy(),
            masked_from: None,
            key: id,
            eos_ids: Vec::new(),
            stop_ids,
            priority: 0,
            extra: None,
            replica: None,
            keys,
        };
        self.got.insert(RequestId(id), (Vec::new(), None));
        self.inbox.push(Event::Submit(Box::new(submit)));
    }

    fn tick(&mut self) {
        let mut effects = Vec::new();
        self.engine.tick(0, &mut self.inbox, &mut effects);
        for effect in effects {
            match effect {
                Effect::Send { replica, batch } => self.check_and_run(replica, &batch),
                Effect::Tokens(events) => events.into_iter().for_each(|e| self.take_news(e)),
                Effect::Kv { .. }
                | Effect::Evicted { .. }
                | Effect::Stats(_)
                | Effect::ControlDone { .. } => {}
            }
        }
        self.engine.check();
    }

    fn check_and_run(&mut self, replica: Replica, batch: &Batch) {
        let tokens: u32 = batch.rows.iter().map(|r| r.len + u32::from(r.drafts)).sum();
        assert!(tokens <= self.config.limits.tokens_per_step, "{tokens} tokens in a step");
        self.devices[usize::from(replica.0)].run(batch, &mut self.random);
    }

    fn take_news(&mut self, event: TokenEvent) {
        let (tokens, finish) = self.got.get_mut(&event.request).expect("news of a request");
        assert_eq!(*finish, None, "news after the end of {:?}", event.request);
        tokens.extend(event.tokens);
        *finish = event.finish;
        assert!(event.preemptions <= 4);
    }

    /// Lets some device answer its oldest step; false if none has one.
    fn answer(&mut self) -> bool {
        let waiting: Vec<usize> =
            (0..self.devices.len()).filter(|&i| !self.devices[i].answers.is_empty()).collect();
        if waiting.is_empty() {
            return false;
        }
        let replica = self.random.pick(&waiting);
        let output = self.devices[replica].answers.pop_front().expect("picked");
        self.inbox.push(Event::Output { replica: Replica(replica as u16), output });
        true
    }
}

/// What the model says to a prompt when it is alone.
fn alone(prompt: &[Token], max_tokens: u32, stop_ids: &[Token]) -> Vec<Token> {
    let mut tokens = prompt.to_vec();
    for _ in 0..max_tokens {
        tokens.push(successor(&tokens));
        if stop_ids.contains(&tokens[tokens.len() - 1]) {
            break;
        }
    }
    tokens.split_off(prompt.len())
}

fn walk(seed: u64, planted: Planted) {
    let mut world = World::new(seed, planted);
    let max_model_len = world.config.limits.max_model_len;
    let shared: Vec<Token> = (0..60).map(|_| world.random.draw(0, VOCAB)).collect();
    let mut asked = Vec::new();
    let mut to_come = world.random.draw(1, 25);
    let aborts = world.random.pick(&[0, 0, 20]);
    for round in 0.. {
        assert!(round < 100_000, "no progress");
        while to_come > 0 && world.random.draw(0, 4) == 0 {
            to_come -= 1;
            let len = world.random.draw(1, max_model_len);
            let common = world.random.draw(0, len + 1).min(60);
            let mut prompt = shared[..common as usize].to_vec();
            prompt.extend((common..len).map(|_| world.random.draw(0, VOCAB)));
            let max_tokens = world.random.draw(0, max_model_len - len + 1);
            let stop_ids = vec![world.random.draw(0, 2 * VOCAB)];
            world.submit(asked.len() as u64, prompt.clone(), max_tokens, stop_ids.clone());
            asked.push((prompt, max_tokens, stop_ids));
        }
        let mut taken_back = None;
        if aborts > 0 && world.random.draw(0, aborts) == 0 && !asked.is_empty() {
            let request = RequestId(u64::from(world.random.draw(0, asked.len() as u32)));
            world.inbox.push(Event::Abort { request, cause: AbortCause::ClientGone });
            taken_back = Some(request);
        }
        let answered = world.random.draw(0, 3) > 0 && world.answer();
        let silent = world.devices.iter().all(|device| device.answers.is_empty());
        let had_events = !world.inbox.is_empty();
        world.tick();
        let ended = taken_back.is_none_or(|request| world.got[&request].1.is_some());
        assert!(ended, "{taken_back:?} outlives its abort");
        if to_come == 0 && !answered && silent && !had_events && world.engine.is_idle() {
            break;
        }
    }
    for (i, (prompt, max_tokens, stop_ids)) in asked.iter().enumerate() {
        let (tokens, finish) = &world.got[&RequestId(i as u64)];
        let expected = alone(prompt, *max_tokens, stop_ids);
        match finish {
            Some(Finish::Abort(_)) => assert!(expected.starts_with(tokens), "request {i}"),
            Some(Finish::Stop(_) | Finish::Length) => assert_eq!(*tokens, expected, "request {i}"),
            other => panic!("request {i} ended as {other:?}"),
        }
    }
}

#[test]
fn walks_end_with_the_tokens_of_each_request_alone() {
    for seed in 0..2_000 {
        let outcome = std::panic::catch_unwind(|| walk(seed, Planted::default()));
        assert!(outcome.is_ok(), "seed {seed}");
    }
}

#[cfg(feature = "planted")]
#[test]
fn walks_find_planted_bugs() {
    // These need losses, failed rows, repeated outputs, salts, a watch on events, clocks that pause, shared names, or drafts near a
    // limit: `tests/sim` has them.
    let beyond = |bug| {
        use scheduler::Bug;
        matches!(
            bug,
            Bug::EvictionWithoutEvent
                | Bug::ErrorRowPublished
                | Bug::SaltIgnored
                | Bug::LossKeepsIndex
                | Bug::OvertakesBlockedHead
                | Bug::RepeatedOutputApplied
                | Bug::LimitForgetsSlack
                | Bug::SeatReadLate
                | Bug::PauseIsSilence
                | Bug::PauseIsStepTime
                | Bug::PiledBeatsAreLooks
                | Bug::NameIsId
                | Bug::OrderMissesNamesake
        )
    };
    let found = |&bug: &scheduler::Bug| {
        let fails = |seed| std::panic::catch_unwind(|| walk(seed, Planted::bug(bug))).is_err();
        let seed = (0..2_000).find(|&seed| fails(seed));
        println!("{bug:?}: {seed:?}");
        seed.is_some()
    };
    let bugs = scheduler::Bug::OF_REPLICAS.into_iter().filter(|&bug| !beyond(bug));
    let missed: Vec<_> = bugs.filter(|bug| !found(bug)).collect();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
