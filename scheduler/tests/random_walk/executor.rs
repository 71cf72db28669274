//! Executor of the random walks, and their random numbers.

use super::*;

pub(super) struct RandomWalkRng(pub(super) u64);

impl RandomWalkRng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number in `[low, high)`.
    pub(super) fn draw(&mut self, low: u32, high: u32) -> u32 {
        low + (self.next() % u64::from(high - low)) as u32
    }

    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.draw(0, from.len() as u32) as usize]
    }
}

/// Returns the token that the model samples after `prefix`.
pub(super) fn next_token(prefix: &[Token]) -> Token {
    let fold =
        |h: u64, &t: &Token| (h ^ u64::from(t)).wrapping_mul(0x100_0000_01b3).rotate_left(23);
    (prefix.iter().fold(0xcbf2_9ce4_8422_2325, fold) >> 11) as u32 % VOCAB
}

/// Simulated state of one sequence slot: block table, next position and last token.
#[derive(Default)]
pub(super) struct RandomWalkSequenceSlot {
    table: Vec<BlockId>,
    next: u32,
    last: Token,
}

/// Simulated executor of one replica. `slots` holds the position and the token of each KV slot of its pool.
pub(super) struct RandomWalkExecutor {
    pub(super) block_tokens: u32,
    pub(super) slots: Vec<Option<(u32, Token)>>,
    pub(super) seq_slots: BTreeMap<u32, RandomWalkSequenceSlot>,
    pub(super) outputs: VecDeque<StepOutput>,
}

impl RandomWalkExecutor {
    pub(super) fn run(&mut self, batch: &Batch, random: &mut RandomWalkRng) {
        let rows = batch.rows.iter().map(|row| self.run_row(row, random)).collect();
        let (timing, expert_tokens) = (StepTiming::default(), Vec::new());
        let (step, epoch) = (batch.step, batch.epoch);
        self.outputs.push_back(StepOutput { step, epoch, rows, timing, expert_tokens });
    }

    fn run_row(&mut self, row: &BatchRow, random: &mut RandomWalkRng) -> RowOutput {
        let slot_state = self.seq_slots.entry(row.seq_slot.0).or_default();
        if row.seq_init.is_some() {
            *slot_state = RandomWalkSequenceSlot::default();
        }
        for update in &row.table_updates {
            slot_state.table.truncate(update.first_entry as usize);
            assert_eq!(
                slot_state.table.len(),
                update.first_entry as usize,
                "a table update leaves a gap"
            );
            slot_state.table.extend(&update.blocks);
        }
        let (start, tokens) = match &row.input {
            RowInput::Tokens(tokens) => (row.start, tokens.clone()),
            RowInput::SampledAt { .. } => (slot_state.next, TokenVec::one(slot_state.last)),
        };
        let furthest = row.start + row.input.draft_slack();
        assert!((row.start..=furthest).contains(&start), "{start} {} {furthest}", row.start);
        let (table, block_tokens) = (slot_state.table.clone(), self.block_tokens);
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
            let (at, token) = self.slots[slot(position)].expect("the KV slot was written");
            assert_eq!(at, position, "the KV slot holds another position");
            token
        };
        let mut prefix: Vec<Token> = (0..end).map(read).collect();
        let mut drafted = prefix.clone();
        for _ in 0..row.drafts {
            let wrong = u32::from(random.draw(0, 3) == 0);
            let draft = (next_token(&drafted) + wrong) % VOCAB;
            self.slots[slot(drafted.len() as u32)] = Some((drafted.len() as u32, draft));
            drafted.push(draft);
        }
        let mut result = RowOutput { drafted: row.drafts, ..RowOutput::default() };
        loop {
            let token = next_token(&prefix);
            result.sampled_tokens.push(token);
            if drafted.get(prefix.len()) != Some(&token) {
                break;
            }
            result.accepted += 1;
            prefix.push(token);
        }
        let slot_state = self.seq_slots.get_mut(&row.seq_slot.0).expect("inserted above");
        (slot_state.next, slot_state.last) = (
            end + u32::from(result.accepted),
            result.sampled_tokens[result.sampled_tokens.len() - 1],
        );
        result
    }
}
