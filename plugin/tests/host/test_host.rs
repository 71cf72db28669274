//! A host with its own KV blocks: memory of its arrays, block tables of its sequences, and steps of any rows.

use hadron_plugin::ForeignStep;
use serde_json::Value;

pub(crate) use crate::host_memory::{F32, HostMemory, I32, I64};
use crate::test_model::{CallError, TestModel};

pub(crate) const BLOCK_TOKENS: usize = 16;
pub(crate) const BLOCKS: usize = 96;

/// Tokens `[start, start + len)` of a sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostRow {
    pub(crate) sequence: usize,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

/// Contents of the arrays of one step.
#[derive(Debug, Clone)]
pub(crate) struct StepValues {
    token_ids: Vec<i32>,
    positions: Vec<i64>,
    slots: Vec<i64>,
    row_starts: Vec<i32>,
    context_lens: Vec<i32>,
    block_tables: Vec<i32>,
}

impl StepValues {
    /// Index of the last token of each row.
    fn last_tokens(&self) -> Vec<i32> {
        self.row_starts[1..].iter().map(|end| end - 1).collect()
    }
}

/// Arrays of one step in the memory of the host.
pub(crate) struct StepMemory {
    token_ids: HostMemory,
    positions: HostMemory,
    slots: HostMemory,
    row_starts: HostMemory,
    context_lens: HostMemory,
    block_tables: HostMemory,
    output_tokens: HostMemory,
    pub(crate) hidden: HostMemory,
}

impl StepMemory {
    pub(crate) fn new(values: &StepValues, hidden_size: usize) -> Self {
        Self {
            token_ids: HostMemory::of(&values.token_ids),
            positions: HostMemory::of(&values.positions),
            slots: HostMemory::of(&values.slots),
            row_starts: HostMemory::of(&values.row_starts),
            context_lens: HostMemory::of(&values.context_lens),
            block_tables: HostMemory::of(&values.block_tables),
            output_tokens: HostMemory::of(&values.last_tokens()),
            hidden: HostMemory::new(values.token_ids.len() * hidden_size * 4, 0xff),
        }
    }

    /// Replaces the contents of the arrays, which keep their addresses.
    pub(crate) fn replace(&mut self, values: &StepValues) {
        self.token_ids.write(&values.token_ids);
        self.positions.write(&values.positions);
        self.slots.write(&values.slots);
        self.row_starts.write(&values.row_starts);
        self.context_lens.write(&values.context_lens);
        self.block_tables.write(&values.block_tables);
    }

    /// Returns the step with the addresses of the arrays; all other fields are those of `sizes`.
    fn step(&self, sizes: ForeignStep) -> ForeignStep {
        ForeignStep {
            struct_bytes: size_of::<ForeignStep>() as u32,
            token_ids: self.token_ids.array(I32),
            positions: self.positions.array(I64),
            slots: self.slots.array(I64),
            row_starts: self.row_starts.array(I32),
            context_lens: self.context_lens.array(I32),
            block_tables: self.block_tables.array(I32),
            output_tokens: self.output_tokens.array(I32),
            hidden: self.hidden.array(F32),
            ..sizes
        }
    }
}

/// A step, and the memory to which it refers.
pub(crate) struct HostStep {
    pub(crate) memory: StepMemory,
    pub(crate) step: ForeignStep,
}

/// Sequences with their tokens and block tables, the KV cache of a model, and its sizes.
pub(crate) struct TestHost {
    pub(crate) layers: Vec<HostMemory>,
    pub(crate) hidden_size: usize,
    pub(crate) vocab: usize,
    pub(crate) tokens: Vec<Vec<i32>>,
    tables: Vec<Vec<i32>>,
    free_blocks: Vec<i32>,
    pub(crate) stream: u64,
}

impl TestHost {
    /// Allocates the KV cache of `model` and binds it.
    pub(crate) fn new(model: &TestModel) -> Self {
        let about = model.describe();
        let layers = about["kv_layers"].as_array().unwrap();
        let layers = layers.iter().map(|layer| HostMemory::new(layer_bytes(layer), 0xff)).collect();
        let size = |name: &str| about[name].as_u64().unwrap() as usize;
        // Blocks of a sequence are scattered.
        let free_blocks = (0..BLOCKS).map(|i| (i * 37 % BLOCKS) as i32).collect();
        let (hidden_size, vocab) = (size("hidden_size"), size("vocab_size"));
        let host = Self {
            layers,
            hidden_size,
            vocab,
            tokens: vec![],
            tables: vec![],
            free_blocks,
            stream: 0,
        };
        host.bind(model).unwrap();
        host
    }

    pub(crate) fn bind(&self, model: &TestModel) -> Result<(), CallError> {
        let arrays: Vec<_> = self.layers.iter().map(|layer| layer.array(F32)).collect();
        model.bind_kv(&arrays, BLOCKS as u64, BLOCK_TOKENS as u64)
    }

    /// Adds a sequence, and returns its index.
    pub(crate) fn add(&mut self, tokens: &[i32]) -> usize {
        self.tokens.push(tokens.to_vec());
        self.tables.push(vec![]);
        self.tokens.len() - 1
    }

    /// Frees the blocks of all sequences and removes the sequences.
    pub(crate) fn clear(&mut self) {
        self.tokens.clear();
        self.free_blocks.extend(self.tables.drain(..).flatten());
    }

    /// Returns the arrays of a step with the rows `rows`, whose block tables have `width` entries. With `padded`, the step has
    /// that number of rows of one token, and the arrays have garbage where it is padded.
    pub(crate) fn values(
        &mut self,
        rows: &[HostRow],
        padded: Option<usize>,
        width: usize,
    ) -> StepValues {
        for row in rows {
            let table = &mut self.tables[row.sequence];
            while table.len() * BLOCK_TOKENS < row.start + row.len {
                table.push(self.free_blocks.pop().unwrap());
            }
        }
        let tokens: usize = rows.iter().map(|row| row.len).sum();
        let all_tokens = padded.unwrap_or(tokens);
        let all_rows = padded.unwrap_or(rows.len());
        let mut values = StepValues {
            token_ids: vec![-77; all_tokens],
            positions: vec![1 << 40; all_tokens],
            slots: vec![5; all_tokens],
            row_starts: vec![tokens as i32; all_rows + 1],
            context_lens: vec![0; all_rows],
            block_tables: vec![-9; all_rows * width],
        };
        let mut t = 0;
        for (r, row) in rows.iter().enumerate() {
            values.row_starts[r] = t as i32;
            values.context_lens[r] = (row.start + row.len) as i32;
            let table = &self.tables[row.sequence];
            values.block_tables[r * width..][..table.len()].copy_from_slice(table);
            for position in row.start..row.start + row.len {
                values.token_ids[t] = self.tokens[row.sequence][position];
                values.positions[t] = position as i64;
                let first = i64::from(table[position / BLOCK_TOKENS]) * BLOCK_TOKENS as i64;
                values.slots[t] = first + (position % BLOCK_TOKENS) as i64;
                t += 1;
            }
        }
        values
    }

    /// Writes the arrays of a step with the rows `rows` of any length.
    pub(crate) fn write(&mut self, rows: &[HostRow]) -> HostStep {
        let entries = |row: &HostRow| (row.start + row.len).div_ceil(BLOCK_TOKENS);
        let width = 1 + rows.iter().map(entries).max().unwrap_or(0);
        let values = self.values(rows, None, width);
        let memory = StepMemory::new(&values, self.hidden_size);
        let step = memory.step(ForeignStep {
            stream: self.stream,
            tokens: values.token_ids.len() as u32,
            rows: rows.len() as u32,
            table_width: width as u32,
            decode_rows: rows.iter().take_while(|row| row.len == 1).count() as u32,
            max_query_len: rows.iter().map(|row| row.len).max().unwrap_or(0) as u32,
            max_context_len: values.context_lens.iter().copied().max().unwrap_or(0) as u32,
            ..ForeignStep::default()
        });
        HostStep { memory, step }
    }

    /// Returns the decode step of `memory`, which has `padded` rows of one token and contexts of up to `longest` keys.
    pub(crate) fn decode_step(
        &self,
        memory: &StepMemory,
        padded: usize,
        width: usize,
        longest: usize,
    ) -> ForeignStep {
        memory.step(ForeignStep {
            one_token_rows: 1,
            stream: self.stream,
            tokens: padded as u32,
            rows: padded as u32,
            table_width: width as u32,
            decode_rows: padded as u32,
            max_query_len: 1,
            max_context_len: longest as u32,
            ..ForeignStep::default()
        })
    }

    /// Computes the logits of the first `tokens` hidden states of a step.
    pub(crate) fn logits(&self, model: &TestModel, memory: &StepMemory, tokens: usize) -> Vec<f32> {
        let logits = HostMemory::new(tokens * self.vocab * 4, 0xff);
        let hidden = memory.hidden.array(F32);
        model.logits(self.stream, &hidden, &logits.array(F32), tokens as u64).unwrap();
        logits.read(tokens * self.vocab)
    }

    /// Runs a step and returns the logits of all its tokens.
    pub(crate) fn run(&mut self, model: &TestModel, rows: &[HostRow]) -> Vec<f32> {
        let HostStep { memory, step } = self.write(rows);
        model.forward(&step).unwrap();
        self.logits(model, &memory, step.tokens as usize)
    }

    /// Runs a step that computes hidden states of the last token of each row, and returns their logits.
    pub(crate) fn run_for_last(&mut self, model: &TestModel, rows: &[HostRow]) -> Vec<f32> {
        let HostStep { memory, mut step } = self.write(rows);
        step.outputs = step.rows;
        model.forward(&step).unwrap();
        self.logits(model, &memory, rows.len())
    }

    /// Runs tokens `[start, start + len)` of a sequence alone.
    pub(crate) fn run_one(
        &mut self,
        model: &TestModel,
        sequence: usize,
        start: usize,
        len: usize,
    ) -> Vec<f32> {
        self.run(model, &[HostRow { sequence, start, len }])
    }

    /// Token ids with the largest logit in each row of `logits`.
    pub(crate) fn greedy(&self, logits: &[f32]) -> Vec<i32> {
        let largest = |row: &[f32]| {
            let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a)));
            best.unwrap() as i32
        };
        logits.chunks(self.vocab).map(largest).collect()
    }
}

/// Bytes of a layer of the KV cache in f32, by its description.
fn layer_bytes(layer: &Value) -> usize {
    let number = |name: &str| layer[name].as_u64().unwrap() as usize;
    let token = match layer["kind"].as_str().unwrap() {
        "mla" => number("width"),
        _ => 2 * number("kv_heads") * number("head_dim"),
    };
    BLOCKS * BLOCK_TOKENS * token * 4
}

/// StepSequence of a linear congruential generator, below a bound.
pub(crate) struct StepSequence(pub(crate) u64);

impl StepSequence {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}
