//! A step with draft tokens, after which the states of all layers are those of a run of the accepted tokens alone.

use device::{Buffer, DType, DeviceElement, DeviceStream, FloatElement};
use kernels::step::{LatestToken, RowMetadataField};
use kernels::{
    CausalConvolution, GatedDeltaRule, KernelBackend, RecurrentStateLayout, ReplayInputArrays,
    ReplayInputWrite, ReplayRowArrays, ReplayRowPreparation, StateReplay, StateSlotRows,
};

const S: DeviceStream = DeviceStream(0);
/// Position of the first token of each sequence.
const START: i32 = 70;
/// Number of tokens and of rows that are padding.
const PADDING: usize = 2;
/// Number of tokens of the longest row.
const MAX_ROW_LEN: usize = 70;

/// Tokens of one sequence in the step.
#[derive(Debug, Clone, Copy)]
struct CaseSequence {
    tokens: usize,
    /// Number of tokens that remain after sampling; `None` = the sequence has no draft tokens.
    accepted: Option<usize>,
    /// State slots plus 1.
    read: i32,
    write: i32,
    /// Whether each token is a row of its own.
    is_split: bool,
}

/// Sequences with and without draft tokens: none, some and all of them are accepted; one forks its state, one starts it.
/// A prompt of many tokens comes last.
const SEQUENCES: [CaseSequence; 7] = [
    CaseSequence { tokens: 3, accepted: Some(2), read: 1, write: 1, is_split: true },
    CaseSequence { tokens: 6, accepted: Some(6), read: 2, write: 3, is_split: false },
    CaseSequence { tokens: 1, accepted: None, read: 4, write: 4, is_split: true },
    CaseSequence { tokens: 2, accepted: Some(0), read: 5, write: 5, is_split: true },
    CaseSequence { tokens: 5, accepted: Some(1), read: 7, write: 7, is_split: false },
    CaseSequence { tokens: 4, accepted: None, read: 0, write: 6, is_split: false },
    CaseSequence { tokens: MAX_ROW_LEN, accepted: None, read: 0, write: 8, is_split: false },
];

/// Where a layer stores the inputs of the first tokens of a step.
struct ReplayStore<'a, 'b> {
    arrays: &'a mut ReplayInputArrays<'b>,
    tokens: usize,
}

/// Inputs of the tokens of all layers, weights, and the state pool before the step.
pub(crate) struct ReplayCase<T> {
    layout: RecurrentStateLayout,
    x: Vec<T>,
    gates: Vec<T>,
    weight: Vec<f32>,
    heads: [Vec<f32>; 2],
    pool: Vec<u8>,
}

/// Returns the next number of a sequence, in [-1, 1).
fn real(seed: &mut u32) -> f32 {
    *seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    (*seed >> 24) as f32 / 128.0 - 1.0
}

impl<T: FloatElement> ReplayCase<T> {
    pub(crate) fn new(key_dim: usize, value_dim: usize) -> Self {
        let (layers, slots, conv_width) = (3, 8, 4);
        let (key_heads, value_heads) = (2, 4);
        let layout = RecurrentStateLayout {
            layers,
            slots,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            conv_width,
        };
        let mut seed = 7;
        let mut reals = |n: usize| -> Vec<f32> { (0..n).map(|_| real(&mut seed)).collect() };
        let elements = |x: Vec<f32>| x.into_iter().map(T::store).collect();
        let tokens = all_tokens() + PADDING;
        let pool = reals(layout.bytes() / 4).iter().flat_map(|x| x.to_le_bytes()).collect();
        Self {
            x: elements(reals(layers * tokens * layout.conv_channels())),
            gates: elements(reals(layers * tokens * 2 * value_heads)),
            weight: reals(conv_width * layout.conv_channels()),
            heads: [reals(value_heads), reals(value_heads)],
            pool,
            layout,
        }
    }

    /// Inputs of the given tokens in one layer, and their gates.
    fn inputs(&self, layer: usize, tokens: &[usize]) -> [Vec<T>; 2] {
        let all = all_tokens() + PADDING;
        let rows = |x: &[T], width: usize| -> Vec<T> {
            let row = |&t: &usize| &x[(layer * all + t) * width..][..width];
            tokens.iter().flat_map(row).copied().collect()
        };
        [rows(&self.x, self.layout.conv_channels()), rows(&self.gates, 2 * self.layout.value_heads)]
    }

    /// Runs all layers over the accepted tokens, without draft tokens. Returns the state pool.
    pub(crate) fn expected(&self, device: &KernelBackend) -> Vec<u8> {
        let (mut first, mut tokens, mut rows) = (0, Vec::new(), StepRows::default());
        for sequence in SEQUENCES {
            let len = sequence.accepted.unwrap_or(sequence.tokens);
            tokens.extend(first..first + len);
            first += sequence.tokens;
            if len > 0 {
                rows.push(len, sequence.read, sequence.write);
            }
        }
        let mut pool = put_bytes(device, &self.pool);
        let rows = rows.upload(device);
        for layer in 0..self.layout.layers {
            self.run_layer(device, &mut pool, layer, &tokens, rows.states(), None);
        }
        get(device, &pool, self.layout.bytes())
    }

    /// Runs all layers over all tokens, and applies the accepted tokens afterwards. Returns the state pool.
    pub(crate) fn replayed(&self, device: &KernelBackend) -> Vec<u8> {
        let (layout, staged) = (&self.layout, StagedRows::new());
        let count = staged.facts.len() / RowMetadataField::COUNT;
        let (cu_q, facts) = (put(device, &staged.cu_q), put(device, &staged.by_field()));
        let (mut cu, mut write) = (put(device, &staged.cu_q), put(device, &vec![9; count]));
        // Entries of earlier steps, some of which are rows of this step.
        let mut first_rows = put(device, &[3, 2, 900, 900, 0, 1]);
        let replays = 6;
        let stored = 17;
        let width = layout.key_channels() + layout.value_channels();
        let filled = |cols: usize, size: usize| {
            put_bytes(device, &vec![0xFF; layout.layers * stored * cols * size])
        };
        let size = size_of::<T>();
        let mut conv_inputs = filled(layout.conv_channels(), size);
        let (mut keys_values, mut gates) = (filled(width, size), filled(2 * layout.value_heads, 4));
        let mut pool = put_bytes(device, &self.pool);
        let facts = facts.mat(DType::I32, RowMetadataField::COUNT, count).unwrap();
        let rows = layout.layers * stored;
        let mut arrays = ReplayRowArrays {
            cu: cu.mat_mut(DType::I32, 1, count + 1).unwrap(),
            write: write.mat_mut(DType::I32, 1, count).unwrap(),
            first_rows: first_rows.mat_mut(DType::I32, 1, replays).unwrap(),
        };
        let op = ReplayRowPreparation {
            arrays: &mut arrays,
            cu_q: cu_q.mat(DType::I32, 1, count + 1).unwrap(),
            facts,
            rows: count,
        };
        device.launch(&S, op).unwrap();
        let mut inputs = ReplayInputArrays {
            conv_inputs: conv_inputs.mat_mut(T::DTYPE, rows, layout.conv_channels()).unwrap(),
            keys_values: keys_values.mat_mut(T::DTYPE, rows, width).unwrap(),
            gates: gates.mat_mut(DType::F32, rows, 2 * layout.value_heads).unwrap(),
        };
        let tokens: Vec<usize> = (0..all_tokens() + PADDING).collect();
        for layer in 0..layout.layers {
            let states = StateSlotRows {
                cu_q: arrays.cu.as_ref(),
                read: facts.rows_from(RowMetadataField::StateRead as usize, 1).columns(0, count),
                write: arrays.write.as_ref(),
                max_row_len: MAX_ROW_LEN,
                chunked_rows: 0,
            };
            let store = Some(ReplayStore { arrays: &mut inputs, tokens: stored });
            self.run_layer(device, &mut pool, layer, &tokens, states, store);
        }
        let (positions, latest) = (put(device, &staged.positions), put(device, &staged.latest));
        let op = StateReplay {
            pool: &mut pool,
            layout,
            inputs: &inputs,
            arrays: &arrays,
            facts,
            rows: count,
            replays,
            positions: positions.mat(DType::I32, 1, staged.positions.len()).unwrap(),
            latest: latest.mat(DType::I32, SEQUENCES.len(), LatestToken::WORDS).unwrap(),
        };
        device.launch(&S, op).unwrap();
        get(device, &pool, self.layout.bytes())
    }

    /// Runs one layer; stores the inputs of the first tokens in `store`, up to its number of tokens.
    fn run_layer(
        &self,
        device: &KernelBackend,
        pool: &mut Buffer,
        layer: usize,
        tokens: &[usize],
        rows: StateSlotRows<'_>,
        store: Option<ReplayStore<'_, '_>>,
    ) {
        let (layout, count) = (&self.layout, tokens.len());
        let (channels, heads) = (layout.conv_channels(), layout.value_heads);
        let [x, gates] = self.inputs(layer, tokens);
        let (x, gates) = (put(device, &x), put(device, &gates));
        let (weight, [a_log, dt_bias]) =
            (put(device, &self.weight), self.heads.each_ref().map(|head| put(device, head)));
        let mut qkv = put(device, &vec![T::store(9.0); count * channels]);
        let mut o = put(device, &vec![T::store(9.0); count * layout.value_channels()]);
        let x = x.mat(T::DTYPE, count, channels).unwrap();
        let op = CausalConvolution {
            y: qkv.mat_mut(T::DTYPE, count, channels).unwrap(),
            x,
            weight: weight.mat(DType::F32, layout.conv_width, channels).unwrap(),
            pool,
            layout,
            layer,
            rows,
        };
        device.launch(&S, op).unwrap();
        let qkv = qkv.mat(T::DTYPE, count, channels).unwrap();
        let gates = gates.mat(T::DTYPE, count, 2 * heads).unwrap();
        let (beta, decay) = (gates.columns(0, heads), gates.columns(heads, heads));
        let [a_log, dt_bias] =
            [&a_log, &dt_bias].map(|head| head.mat(DType::F32, 1, heads).unwrap());
        if let Some(ReplayStore { arrays, tokens }) = store {
            let op = ReplayInputWrite {
                arrays,
                tokens,
                x,
                qkv,
                beta,
                decay,
                a_log,
                dt_bias,
                layout,
                layer,
            };
            device.launch(&S, op).unwrap();
        }
        let o = o.mat_mut(T::DTYPE, count, layout.value_channels()).unwrap();
        let op = GatedDeltaRule { o, qkv, beta, decay, a_log, dt_bias, pool, layout, layer, rows };
        device.launch(&S, op).unwrap();
    }

    /// Values of the delta states of a pool, and the bytes of its other states.
    pub(crate) fn parts(&self, pool: &[u8]) -> (Vec<f32>, Vec<u8>) {
        let (mut deltas, mut others) = (Vec::new(), Vec::new());
        for state in pool.chunks(self.layout.bytes_per_layer()) {
            let (delta, conv) = state.split_at(self.layout.conv_offset());
            deltas.extend(delta.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)));
            others.extend(conv);
        }
        (deltas, others)
    }
}

/// Number of tokens of all sequences.
fn all_tokens() -> usize {
    SEQUENCES.iter().map(|sequence| sequence.tokens).sum()
}

/// Staged rows of the step, with their metadata.
struct StagedRows {
    cu_q: Vec<i32>,
    /// Metadata of each row, by row.
    facts: Vec<i32>,
    positions: Vec<i32>,
    latest: Vec<i32>,
}

impl StagedRows {
    fn new() -> Self {
        let mut staged =
            Self { cu_q: vec![0], facts: Vec::new(), positions: Vec::new(), latest: Vec::new() };
        let mut replays = 0;
        for (seq_slot, sequence) in SEQUENCES.iter().enumerate() {
            let rows = if sequence.is_split { sequence.tokens } else { 1 };
            replays += usize::from(sequence.accepted.is_some());
            for row in 0..rows {
                let len = sequence.tokens / rows;
                staged.cu_q.push(staged.cu_q[staged.cu_q.len() - 1] + len as i32);
                staged.facts.extend(RowMetadataField::ALL.map(|field| match field {
                    RowMetadataField::SequenceSlot => seq_slot as i32,
                    RowMetadataField::ContinuesSequence => 1,
                    RowMetadataField::LaterTokens => (rows - 1 - row) as i32,
                    _ if row > 0 => 0,
                    RowMetadataField::StateRead => sequence.read,
                    RowMetadataField::StateWrite => sequence.write,
                    RowMetadataField::Replay => {
                        if sequence.accepted.is_some() {
                            replays as i32
                        } else {
                            0
                        }
                    }
                }));
            }
            staged.positions.extend((START..).take(sequence.tokens));
            // Without draft tokens, the position has no effect.
            let tokens = sequence.accepted.unwrap_or(1) as i32;
            staged.latest.extend([5, START + tokens, 0]);
        }
        staged.positions.extend([0; PADDING]);
        for _ in 0..PADDING {
            staged.cu_q.push(staged.cu_q[staged.cu_q.len() - 1]);
            staged.facts.extend([0; RowMetadataField::COUNT]);
        }
        staged
    }

    /// Metadata by field, `[fields, rows]`.
    fn by_field(&self) -> Vec<i32> {
        let rows = self.facts.chunks(RowMetadataField::COUNT);
        let field = |i: usize| rows.clone().map(move |row| row[i]);
        (0..RowMetadataField::COUNT).flat_map(field).collect()
    }
}

/// Rows of a step without draft tokens.
#[derive(Default)]
struct StepRows {
    cu_q: Vec<i32>,
    read: Vec<i32>,
    write: Vec<i32>,
}

impl StepRows {
    fn push(&mut self, len: usize, read: i32, write: i32) {
        let first = self.cu_q.last().copied().unwrap_or(0);
        if self.cu_q.is_empty() {
            self.cu_q.push(0);
        }
        self.cu_q.push(first + len as i32);
        self.read.push(read);
        self.write.push(write);
    }

    fn upload(&self, device: &KernelBackend) -> UploadedRows {
        let [cu_q, read, write] =
            [&self.cu_q, &self.read, &self.write].map(|array| put(device, array));
        UploadedRows { rows: self.read.len(), cu_q, read, write }
    }
}

struct UploadedRows {
    rows: usize,
    cu_q: Buffer,
    read: Buffer,
    write: Buffer,
}

impl UploadedRows {
    fn states(&self) -> StateSlotRows<'_> {
        StateSlotRows {
            cu_q: self.cu_q.mat(DType::I32, 1, self.rows + 1).unwrap(),
            read: self.read.mat(DType::I32, 1, self.rows).unwrap(),
            write: self.write.mat(DType::I32, 1, self.rows).unwrap(),
            max_row_len: MAX_ROW_LEN,
            chunked_rows: 0,
        }
    }
}

fn put<T: DeviceElement>(device: &KernelBackend, values: &[T]) -> Buffer {
    // SAFETY: elements are plain numbers without padding.
    let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) };
    put_bytes(device, bytes)
}

fn put_bytes(device: &KernelBackend, bytes: &[u8]) -> Buffer {
    let mut buffer = device.alloc(bytes.len()).unwrap();
    device.upload(&mut buffer, 0, bytes).unwrap();
    buffer
}

fn get(device: &KernelBackend, buffer: &Buffer, bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; bytes];
    device.download(&S, buffer, 0, &mut bytes).unwrap();
    bytes
}
