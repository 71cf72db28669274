//! Paged attention of the GPU: decodes, prefills and mixed batches, with random block tables, sequence slots
//! and stale memory.

use device::{Buffer, DType, DeviceDriver, MatRef, bf16, f16};
use kernels::{
    AttentionKeyRange, AttentionMetadata, BatchRowLengths, BatchUpperBounds, KvLayout, KvTileOrder,
    PagedAttention, PagedAttentionArgs,
};

use crate::device_pair::{CpuGpuMatrix, CpuGpuPair, on_cpu, pairs, rounded, tolerance};
use crate::support::{RandomNumbers, S};

/// Number of query heads, number of KV heads, head dimension, and tokens per block.
type HeadShape = (usize, usize, usize, usize);

/// Rows of an attention step, and a KV pool with the keys and values of these rows, on the GPU and on the
/// CPU.
struct PagedAttentionCase {
    heads: usize,
    /// Keys that queries attend to.
    keys: AttentionKeyRange,
    /// Sinks of the query heads, in natural units; `None` = no sinks.
    sinks: Option<Vec<f32>>,
    layouts: [KvLayout; 2],
    pools: [Buffer; 2],
    /// Tokens and context length of each row.
    rows: Vec<(usize, usize)>,
    tables: Vec<i32>,
    /// Sequence slot of each row, which selects its block table.
    seq_slots: Vec<i32>,
    width: usize,
    /// Maximum number of one-token rows of a request (its newest token and draft tokens) that the kernel
    /// processes together.
    max_rows_per_request: usize,
}

const SLOTS_FREE: usize = 2;

impl PagedAttentionCase {
    fn new(
        pair: &CpuGpuPair,
        numbers: &mut RandomNumbers,
        (heads, kv_heads, head_dim, block_tokens): HeadShape,
        dtype: DType,
        rows: &[(usize, usize)],
    ) -> Self {
        let used = |context: usize| context.div_ceil(block_tokens);
        let blocks = rows.iter().map(|r| used(r.1)).sum::<usize>() + 2;
        let order = KvTileOrder::RowMajor;
        let gpu = KvLayout { layers: 2, blocks, block_tokens, kv_heads, head_dim, dtype, order };
        let layouts =
            [gpu, KvLayout { order: KvTileOrder::LaneInterleaved, dtype: on_cpu(dtype), ..gpu }];
        let width = rows.iter().map(|r| used(r.1)).max().unwrap_or(0) + 1;
        let mut free: Vec<i32> = (0..blocks as i32).collect();
        let mut take = |numbers: &mut RandomNumbers, n: usize| free.swap_remove(numbers.below(n));
        let mut seq_slots: Vec<i32> = (0..(rows.len() + SLOTS_FREE) as i32).collect();
        for i in (1..seq_slots.len()).rev() {
            seq_slots.swap(i, numbers.below(i + 1));
        }
        let mut tables = vec![-7; seq_slots.len() * width]; // Entries after a row's blocks are never read.
        seq_slots.truncate(rows.len());
        // Fills the pool with NaN, as previous requests may leave it.
        let stale = vec![f32::NAN; gpu.bytes() / dtype.bytes()];
        let mut values = [stale.clone(), stale];
        let mut left = blocks;
        for (row, seq_slot) in rows.iter().zip(&seq_slots) {
            for position in 0..row.1 {
                let entry = *seq_slot as usize * width + position / block_tokens;
                if position % block_tokens == 0 {
                    tables[entry] = take(numbers, left);
                    left -= 1;
                }
                let (block, t) = (tables[entry] as usize, position % block_tokens);
                for (head, d) in (0..kv_heads).flat_map(|h| (0..head_dim).map(move |d| (h, d))) {
                    let [key, value] = [0; 2].map(|_| rounded(numbers.float(), dtype));
                    for (values, layout) in values.iter_mut().zip(&layouts) {
                        values[layout.key_tile(1, block, head) + layout.key(t, d)] = key;
                        values[layout.value_tile(1, block, head) + layout.value(t, d)] = value;
                    }
                }
            }
        }
        let mut pools =
            [pair.gpu.alloc(gpu.bytes()).unwrap(), pair.cpu.alloc(layouts[1].bytes()).unwrap()];
        pair.gpu.upload(&mut pools[0], 0, &bytes(&values[0], dtype)).unwrap();
        pair.cpu.upload(&mut pools[1], 0, &bytes(&values[1], on_cpu(dtype))).unwrap();
        Self {
            heads,
            keys: AttentionKeyRange::default(),
            sinks: None,
            layouts,
            pools,
            rows: rows.to_vec(),
            tables,
            seq_slots,
            width,
            max_rows_per_request: 1,
        }
    }

    /// Invalidates the table entries before the block of the first key of each row.
    fn free_unused_blocks(&mut self) {
        let block_tokens = self.layouts[0].block_tokens;
        for (row, seq_slot) in self.rows.iter().zip(&self.seq_slots) {
            let unused = self.keys.first_key(row.1.saturating_sub(row.0)) / block_tokens;
            self.tables[*seq_slot as usize * self.width..][..unused].fill(i32::MAX);
        }
    }

    /// Replaces row `i` by `tokens[i]` one-token rows of the same request.
    fn split_into_single_tokens(&mut self, tokens: &[usize]) {
        let requests = self.rows.iter().zip(&self.seq_slots).zip(tokens);
        let each = requests.flat_map(|((row, seq_slot), &tokens)| {
            (0..tokens).map(move |i| ((1, (row.1 + i + 1).saturating_sub(tokens)), *seq_slot))
        });
        (self.rows, self.seq_slots) = each.unzip();
        self.max_rows_per_request = *tokens.iter().max().unwrap();
    }

    /// Returns random queries: `[tokens, heads * head_dim]`.
    fn queries(&self, pair: &CpuGpuPair, numbers: &mut RandomNumbers) -> CpuGpuMatrix {
        let tokens = self.rows.iter().map(|r| r.0).sum();
        let width = self.heads * self.layouts[0].head_dim;
        pair.random(numbers, self.layouts[0].dtype, tokens, width)
    }

    /// Runs one step with all rows on the GPU, and also on the CPU if `with_cpu`.
    fn run(&self, pair: &CpuGpuPair, q: &CpuGpuMatrix, with_cpu: bool) -> CpuGpuMatrix {
        let rows = self.rows.len();
        let mut cu_q = vec![0i32];
        for row in &self.rows {
            cu_q.push(cu_q[cu_q.len() - 1] + row.0 as i32);
        }
        let contexts: Vec<i32> = self.rows.iter().map(|r| r.1 as i32).collect();
        let cu_q = pair.put(&cu_q, 1, rows + 1);
        let contexts = pair.put(&contexts, 1, rows);
        let tables = pair.put(&self.tables, self.tables.len() / self.width, self.width);
        let seq_slots = pair.put(&self.seq_slots, 1, rows);
        let bounds = BatchUpperBounds::of(
            self.rows.iter().map(|&(tokens, context)| BatchRowLengths { tokens, context }),
            self.max_rows_per_request,
        );
        let sinks = self.sinks.as_ref().map(|sinks| pair.put(sinks, 1, self.heads));
        let mut o = pair.poisoned(self.layouts[0].dtype, q.gpu().rows(), q.gpu().cols());
        let views: [fn(&CpuGpuMatrix) -> MatRef<'_>; 2] = [CpuGpuMatrix::gpu, CpuGpuMatrix::cpu];
        let devices = pair.backends();
        for at in 0..if with_cpu { 2 } else { 1 } {
            let view = views[at];
            let step = AttentionMetadata {
                cu_q: view(&cu_q),
                context_lens: view(&contexts),
                block_tables: view(&tables),
                table_rows: Some(view(&seq_slots)),
                bounds,
            };
            let scale = (self.layouts[0].head_dim as f32).powf(-0.5);
            let args = PagedAttentionArgs {
                q: view(q),
                rows: step,
                heads: self.heads,
                layer: 1,
                scale,
                keys: self.keys,
                sinks: sinks.as_ref().map(view),
            };
            let out = if at == 0 { o.gpu_mut() } else { o.cpu_mut() };
            let pool = (&self.pools[at], &self.layouts[at]);
            devices[at]
                .launch(&S, PagedAttention { o: out, pool: pool.0, layout: pool.1, args: &args })
                .unwrap();
        }
        o
    }
}

fn bytes(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::BF16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

pub(crate) fn check(pair: &CpuGpuPair, heads: HeadShape, dtype: DType, rows: &[(usize, usize)]) {
    check_keys(pair, heads, dtype, rows, AttentionKeyRange::default());
}

/// Compares GPU and CPU for attention in which the positions before `first_position` are masked.
fn check_from(
    pair: &CpuGpuPair,
    heads: HeadShape,
    dtype: DType,
    rows: &[(usize, usize)],
    first_position: usize,
) {
    let keys = AttentionKeyRange { first_position, window: None };
    check_keys(pair, heads, dtype, rows, keys);
}

/// Compares GPU and CPU for attention to the keys in `keys`; with sinks if it has a window of an even size.
/// The blocks before the first key of a row have been freed: their table entries are invalid.
pub(crate) fn check_keys(
    pair: &CpuGpuPair,
    heads: HeadShape,
    dtype: DType,
    rows: &[(usize, usize)],
    keys: AttentionKeyRange,
) {
    let mut numbers = pair.numbers(heads.0 as u64);
    let mut case = PagedAttentionCase::new(pair, &mut numbers, heads, dtype, rows);
    case.keys = keys;
    if keys.window.is_some_and(|window| window % 2 == 0) {
        case.sinks = Some((0..heads.0).map(|head| head as f32 - 1.5).collect());
    }
    case.free_unused_blocks();
    let q = case.queries(pair, &mut numbers);
    let what = format!("{heads:?} {dtype:?} {rows:?}");
    pair.check(&what, &case.run(pair, &q, true), tolerance(dtype));
}

#[test]
fn attention_agrees_with_the_cpu() {
    use DType::{BF16, F32};
    for pair in &pairs() {
        // Decode rows whose keys are processed in one split, in several splits, and with a partial last
        // split.
        check(pair, (4, 2, 128, 16), BF16, &[(1, 1), (1, 129), (1, 300)]);
        check(pair, (8, 1, 64, 32), BF16, &[(1, 33), (1, 128)]);
        // More than four requests (not a small batch), for which the kernel uses longer splits.
        let many = [(1, 1000), (1, 449), (1, 1), (1, 448), (1, 897), (1, 130)];
        check(pair, (4, 2, 128, 16), BF16, &many);
        check(pair, (8, 1, 64, 32), BF16, &many);
        // Prefills: whole prompts, chunks after a prefix, and more (query, head) pairs than one block
        // processes.
        check(pair, (8, 2, 128, 16), BF16, &[(37, 37), (5, 100), (2, 16)]);
        check(pair, (3, 1, 64, 64), BF16, &[(70, 75)]);
        // Keys are processed in several steps: contexts end within a KV block, within a step and at a step
        // boundary. The last batch has more rows than tiles.
        check(pair, (5, 1, 128, 16), BF16, &[(30, 270), (4, 256), (3, 129), (2, 2)]);
        check(pair, (16, 1, 64, 48), BF16, &[(20, 20), (7, 250)]);
        // Prefill and decode rows in one step.
        check(pair, (2, 2, 64, 16), BF16, &[(1, 40), (1, 7), (20, 30), (1, 9)]);
        // Shapes that the tiled kernels do not support, which use other kernels.
        check(pair, (4, 2, 48, 6), BF16, &[(1, 9), (7, 20)]);
        check(pair, (2, 1, 80, 16), F32, &[(1, 40), (9, 70)]);
    }
}

/// Runs more tokens than the maximum grid size in y and z.
#[test]
fn any_number_of_tokens() {
    for pair in &pairs() {
        check(pair, (1, 1, 16, 4), DType::F32, &vec![(1, 1); 66_000]);
    }
}

/// Compares GPU and CPU for attention of an MTP module, which has no KV entry at a request's first position.
#[test]
fn attention_skips_masked_first_position() {
    use DType::{BF16, F32};
    for pair in &pairs() {
        let decodes = [(1, 2), (1, 17), (1, 300), (1, 16), (1, 33), (1, 1000)];
        for rows in [&decodes[..], &decodes[..3]] {
            check_from(pair, (4, 2, 128, 16), BF16, rows, 1);
            check_from(pair, (16, 1, 64, 32), BF16, rows, 1);
            check_from(pair, (4, 2, 48, 6), F32, rows, 1);
        }
        check_from(pair, (4, 2, 64, 16), BF16, &[(1, 5), (7, 20)], 1);
    }
}

#[test]
fn sliding_windows_and_sinks_agree_with_the_cpu() {
    use DType::{BF16, F32};
    for pair in &pairs() {
        for window in [1, 16, 31, 64, 100, 128, 1000] {
            let keys = AttentionKeyRange { first_position: 0, window: Some(window) };
            let decodes = [(1, 1), (1, 127), (1, 128), (1, 144), (1, 300), (1, 1000)];
            check_keys(pair, (4, 2, 128, 16), BF16, &decodes, keys);
            check_keys(pair, (2, 2, 64, 16), BF16, &[(1, 40), (20, 30), (70, 200)], keys);
            check_keys(pair, (2, 1, 48, 6), F32, &[(1, 9), (30, 130)], keys);
        }
        let keys = AttentionKeyRange { first_position: 1, window: Some(20) };
        check_keys(pair, (2, 1, 512, 16), BF16, &[(1, 21), (1, 22), (5, 60)], keys);
        check_keys(pair, (4, 2, 128, 16), BF16, &[(1, 2), (1, 17), (1, 21), (1, 40), (1, 9)], keys);
    }
}

/// Returns a window of `window` keys.
pub(crate) fn window(window: usize) -> AttentionKeyRange {
    AttentionKeyRange { first_position: 0, window: Some(window) }
}

/// Windows that are shorter than a KV block, that begin within a tile, and that are much shorter than the context,
/// with eight query heads per KV head; decode rows of small and of large batches, chunks and whole prompts.
#[test]
fn windows_of_shared_heads_agree_with_the_cpu() {
    for pair in &pairs() {
        let prefills = [(1, 300), (40, 40), (30, 290), (17, 129)];
        for keys in [window(5), window(24), window(128)] {
            let decodes = [(1, 1), (1, 128), (1, 129), (1, 300), (1, 143)];
            check_keys(pair, (8, 1, 64, 64), DType::BF16, &decodes, keys);
            check_keys(pair, (8, 1, 64, 64), DType::BF16, &decodes[..4], keys);
            check_keys(pair, (8, 1, 64, 64), DType::BF16, &prefills, keys);
        }
        check_keys(pair, (8, 1, 64, 64), DType::BF16, &[(1, 4096), (1, 4000)], window(128));
        check_keys(pair, (8, 1, 64, 64), DType::BF16, &[(20, 2100)], window(128));
        check_keys(pair, (4, 2, 128, 16), DType::BF16, &[(1, 1100), (40, 700)], window(513));
    }
}

#[test]
fn heads_of_256_channels_agree_with_the_cpu() {
    for pair in &pairs() {
        check_large_heads(pair, 256);
    }
}

#[test]
fn heads_of_512_channels_agree_with_the_cpu() {
    for pair in &pairs() {
        check_large_heads(pair, 512);
    }
}

/// Decode rows of small and of large batches, and prefills with more (query, head) pairs than a block processes; with
/// several KV heads, with more query heads per KV head than a block of the decode kernel processes, and with a window
/// and sinks.
fn check_large_heads(pair: &CpuGpuPair, dim: usize) {
    let rows = [(1, 1), (1, 129), (1, 300), (1, 16), (1, 65)];
    for heads in [(4, 2, dim, 16), (16, 1, dim, 32)] {
        check(pair, heads, DType::BF16, &rows);
        check(pair, heads, DType::BF16, &rows[..3]);
        check(pair, heads, DType::BF16, &[(1, 40), (37, 37), (5, 100), (3, 32)]);
    }
    check(pair, (5, 1, dim, 16), DType::BF16, &[(30, 270), (4, 256), (3, 129), (2, 2)]);
    for keys in [window(33), window(96)] {
        check_keys(pair, (4, 2, dim, 16), DType::BF16, &rows, keys);
        let prefills = [(1, 90), (37, 137), (70, 70)];
        check_keys(pair, (4, 2, dim, 16), DType::BF16, &prefills, keys);
    }
}

/// KV heads with more query heads than a block processes together.
#[test]
fn many_query_heads_of_a_kv_head_agree_with_the_cpu() {
    for pair in &pairs() {
        let rows = [(1, 70), (1, 300), (9, 40)];
        check(pair, (48, 2, 64, 16), DType::BF16, &rows);
        check_keys(pair, (34, 2, 64, 16), DType::BF16, &rows, window(40));
    }
}

/// A sink that exceeds all scores makes the outputs zero; a sink that all scores exceed has no effect.
#[test]
fn extreme_sinks_agree_with_the_cpu() {
    for pair in &pairs() {
        for rows in
            [&[(1, 300), (1, 20), (20, 150)][..], &[(1, 3), (1, 900), (1, 40), (1, 5), (1, 7)]]
        {
            for keys in [AttentionKeyRange::default(), window(128)] {
                let heads = (8, 2, 64, 16);
                let mut numbers = pair.numbers(9);
                let mut case =
                    PagedAttentionCase::new(pair, &mut numbers, heads, DType::BF16, rows);
                case.keys = keys;
                case.sinks = Some(vec![-1e4, 1e4, 1e30, -1e30, 30.0, -30.0, 0.0, 80.0]);
                let q = case.queries(pair, &mut numbers);
                let o = case.run(pair, &q, true);
                pair.check(&format!("{rows:?} {keys:?}"), &o, tolerance(DType::BF16));
                let [o, _] = pair.read_floats(&o);
                for row in o.chunks(heads.0 * heads.2) {
                    assert!(row[64..192].iter().all(|x| *x == 0.0), "large sinks");
                    assert!(row[..64].iter().any(|x| *x != 0.0), "small sink");
                }
            }
        }
    }
}

/// Runs more decode rows than a block has threads, so that each thread that computes the split schedule has
/// several rows.
#[test]
fn decodes_of_many_rows_agree_with_the_cpu() {
    let rows: Vec<_> = (0..300).map(|row| (1, 1 + row * 7 % 45 + row % 50 / 49 * 900)).collect();
    for pair in &pairs() {
        check(pair, (2, 1, 64, 16), DType::BF16, &rows);
    }
}

/// The output of a prompt token has the same bits alone and in a batch, and with whole and with chunked
/// prefill.
#[test]
fn chunked_prefill_matches_whole_prefill_bitwise() {
    for pair in &pairs() {
        check_chunks(pair, (6, 2, 64, 16), AttentionKeyRange::default());
        check_chunks(pair, (6, 2, 64, 16), window(50));
        check_chunks(pair, (4, 2, 256, 16), window(50));
        check_chunks(pair, (4, 2, 256, 16), AttentionKeyRange::default());
        check_chunks(pair, (4, 2, 512, 16), window(50));
    }
}

fn check_chunks(pair: &CpuGpuPair, heads: HeadShape, keys: AttentionKeyRange) {
    let width = heads.0 * heads.2;
    let mut numbers = pair.numbers(5);
    let rows = [(75, 290), (3, 3), (65, 131)];
    let mut case = PagedAttentionCase::new(pair, &mut numbers, heads, DType::BF16, &rows);
    case.keys = keys;
    let tokens: usize = rows.iter().map(|r| r.0).sum();
    let values = numbers.reals::<bf16>(tokens * width);
    let [all, _] = pair.read_floats(&case.run(pair, &pair.put(&values, tokens, width), false));
    let (seq_slots, mut begin) = (case.seq_slots.clone(), 0);
    for ((tokens, context), seq_slot) in rows.into_iter().zip(seq_slots) {
        for (from, to) in [(0, tokens), (0, 2), (2, tokens)] {
            let (n, at) = (to - from, (begin + from) * width);
            (case.rows, case.seq_slots) = (vec![(n, context - tokens + to)], vec![seq_slot]);
            let q = pair.put(&values[at..at + n * width], n, width);
            let [single_row, _] = pair.read_floats(&case.run(pair, &q, false));
            // A single token is a decode row, which sums in another order.
            if n > 1 {
                assert_eq!(single_row, all[at..at + n * width], "{from} to {to} of {tokens}");
            }
        }
        begin += tokens;
    }
}

/// A padding row of a captured graph has no keys: its output is zeros, and it does not affect other rows.
#[test]
fn rows_without_keys_are_zero() {
    for pair in &pairs() {
        for heads in [(4, 2, 64, 16), (2, 1, 32, 16)] {
            for queries in [1, 5] {
                let mut numbers = pair.numbers(3);
                let rows = [(queries, 20), (queries, 0), (1, 0)];
                let case = PagedAttentionCase::new(pair, &mut numbers, heads, DType::BF16, &rows);
                let q = case.queries(pair, &mut numbers);
                let [o, _] = pair.read_floats(&case.run(pair, &q, false));
                let width = queries * heads.0 * heads.2;
                assert!(o[..width].iter().all(|x| x.is_finite()));
                assert!(o[width..].iter().all(|x| *x == 0.0));
            }
        }
    }
}

/// Decode rows have the same bits in small and in large batches, for any grid size.
#[test]
fn decodes_are_batch_invariant() {
    let heads = (4, 2, 64, 16);
    let few = [(1, 290), (1, 3), (1, 131), (1, 64)];
    let many =
        [(1, 900), (1, 3), (1, 449), (1, 64), (1, 1350), (1, 131), (1, 448), (1, 2), (1, 30)];
    for pair in &pairs() {
        for keys in [AttentionKeyRange::default(), window(100), window(700)] {
            check_batch_invariance(pair, heads, &few, 1, keys);
            check_batch_invariance(pair, heads, &many, 5, keys);
        }
    }
}

/// One-token rows of a request with draft tokens are processed together. The output of each row matches the
/// CPU and has the same bits as the row processed separately: with splits that begin or end between the
/// context lengths of the rows, and with more rows than one block processes.
#[test]
fn successive_tokens_of_a_request_agree_with_the_cpu() {
    let requests = [(1, 259), (1, 1), (1, 0), (1, 452), (1, 18), (1, 17), (1, 900)];
    let tokens = [5, 1, 1, 5, 2, 4, 3];
    for pair in &pairs() {
        let whole = AttentionKeyRange::default();
        for (heads, dtype, keys) in [
            ((2, 2, 64, 16), DType::BF16, whole),
            ((4, 1, 128, 32), DType::BF16, whole),
            ((16, 1, 64, 16), DType::BF16, whole),
            ((2, 1, 256, 16), DType::BF16, whole),
            ((2, 1, 512, 16), DType::BF16, whole),
            ((2, 2, 64, 16), DType::BF16, window(40)),
            ((8, 1, 64, 16), DType::BF16, window(452)),
        ] {
            let mut numbers = pair.numbers(6);
            let mut case = PagedAttentionCase::new(pair, &mut numbers, heads, dtype, &requests);
            case.keys = keys;
            case.split_into_single_tokens(&tokens);
            let (rows, seq_slots, width) =
                (case.rows.clone(), case.seq_slots.clone(), heads.0 * heads.2);
            let values = numbers.reals::<bf16>(rows.len() * width);
            let q = pair.put(&values, rows.len(), width);
            let what = format!("{heads:?}, successive tokens");
            let all = case.run(pair, &q, true);
            pair.check(&what, &all, tolerance(dtype));
            let [all, _] = pair.read_floats(&all);
            // This order makes the rows of a request non-adjacent, so that the kernel processes each row
            // alone. The number of rows stays the same, so that splits have equal length.
            let permuted: Vec<usize> = (0..rows.len()).map(|i| i * 8 % rows.len()).collect();
            (case.rows, case.seq_slots) = permuted.iter().map(|&i| (rows[i], seq_slots[i])).unzip();
            let values: Vec<bf16> =
                permuted.iter().flat_map(|&i| values[i * width..][..width].to_vec()).collect();
            let q = pair.put(&values, rows.len(), width);
            let [reordered, _] = pair.read_floats(&case.run(pair, &q, false));
            for (row, i) in reordered.chunks(width).zip(permuted) {
                assert_eq!(row, &all[i * width..][..width], "{what}: row {i}");
            }
        }
    }
}

/// Checks that the outputs have the same bits when all rows are in one batch and when the batch is split into
/// batches of `part` rows.
fn check_batch_invariance(
    pair: &CpuGpuPair,
    heads: HeadShape,
    rows: &[(usize, usize)],
    part: usize,
    keys: AttentionKeyRange,
) {
    let mut numbers = pair.numbers(4);
    let mut case = PagedAttentionCase::new(pair, &mut numbers, heads, DType::BF16, rows);
    case.keys = keys;
    let width = heads.0 * heads.2;
    let values = numbers.reals::<bf16>(rows.len() * width);
    let q = pair.put(&values, rows.len(), width);
    let [all, _] = pair.read_floats(&case.run(pair, &q, false));
    let seq_slots = case.seq_slots.clone();
    for from in 0..=rows.len() - part {
        let to = from + part;
        (case.rows, case.seq_slots) = (rows[from..to].to_vec(), seq_slots[from..to].to_vec());
        let q = pair.put(&values[from * width..to * width], part, width);
        let [separate_rows, _] = pair.read_floats(&case.run(pair, &q, false));
        assert_eq!(separate_rows, all[from * width..to * width], "rows {from} to {to}");
    }
}
