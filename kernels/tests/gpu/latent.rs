//! Latent attention against the CPU: rows of one token and of many, blocks in any order, both types.

use kernels::{
    BatchRows, DType, Driver, HostMat, Kernels, LatentAttention, LatentHeads, LatentLayout,
    LatentWrite, Mat, Rope, RowBounds,
};

use crate::pair::{Pair, Twin, on_cpu, pairs, rounded, tolerance};
use crate::support::{S, error};
use std::ops::Range;

/// Heads, latent, turned, unturned, value channels, block size.
type Sizes = [usize; 6];

/// Queries and contexts of rows: they see so many of the first tokens, and ask for the last of these.
pub(crate) type Rows<'a> = &'a [(usize, usize)];

pub(crate) const SHORT: Rows<'static> = &[(1, 75), (1, 1), (5, 70), (3, 3)];
/// Some of several splits, one of none.
pub(crate) const LONG: Rows<'static> = &[(1, 600), (1, 257), (1, 0), (1, 16), (3, 130)];

/// `[n, k]` of four bytes to `[k, n]`.
fn transposed(x: &[u8], k: usize) -> Vec<u8> {
    let words = x.as_chunks::<4>().0;
    (0..k).flat_map(|c| words.iter().skip(c).step_by(k)).flatten().copied().collect()
}

pub(crate) fn check(pair: &Pair, sizes: Sizes, asked: (Rows<'_>, usize), dtype: DType) {
    check_from(pair, sizes, asked, dtype, 0);
}

/// The same where the first so many positions are not seen.
fn check_from(pair: &Pair, sizes: Sizes, asked: (Rows<'_>, usize), dtype: DType, first: usize) {
    let seats: Vec<i32> = (0..asked.0.len() as i32).collect();
    check_of(pair, sizes, asked, dtype, (first, &seats, 1));
}

/// The same where rows are requests' on these seats, up to so many of each, which gives what rows do that are taken one by one.
fn check_of(
    pair: &Pair,
    sizes: Sizes,
    (asking, decode_rows): (Rows<'_>, usize),
    dtype: DType,
    (first, seats, successive): (usize, &[i32], usize),
) {
    let [heads, latent, rotary, unturned, value, block_tokens] = sizes;
    let tokens = asking.iter().map(|row| row.1).max().unwrap();
    let mut numbers = pair.numbers((heads * latent) as u64);
    let blocks = tokens.div_ceil(block_tokens) + 1;
    let layout = LatentLayout { layers: 2, blocks, block_tokens, latent, rotary, dtype };
    let layouts = [layout, LatentLayout { dtype: on_cpu(dtype), ..layout }];
    let mut pools =
        [pair.gpu.alloc(layout.bytes()).unwrap(), pair.cpu.alloc(layouts[1].bytes()).unwrap()];
    // An earlier owner left NaN everywhere.
    let stale = vec![0xff; layouts[1].bytes()];
    pair.gpu.upload(&mut pools[0], 0, &stale[..layout.bytes()]).unwrap();
    pair.cpu.upload(&mut pools[1], 0, &stale).unwrap();
    let table: Vec<i32> = (0..blocks).map(|b| ((b * 7919 + 3) % blocks) as i32).collect();
    let place = |t: usize| table[t / block_tokens] as usize * block_tokens + t % block_tokens;
    // The last token is kept nowhere: nobody sees it.
    let kept = tokens + 1;
    let slots: Vec<i64> = (0..tokens).map(|t| place(t) as i64).chain([-1]).collect();
    let positions: Vec<i32> = (0..kept as i32).collect();
    let (slots, positions) = (pair.put(&slots, 1, kept), pair.put(&positions, 1, kept));
    let kv = pair.random(&mut numbers, dtype, kept, latent + rotary);
    let norm = pair.random(&mut numbers, dtype, 1, latent);
    let [cos, sin] = [0; 2].map(|_| pair.random(&mut numbers, DType::F32, kept, rotary / 2));
    let mut q = pair.random(&mut numbers, dtype, kept, heads * (unturned + rotary));

    let mut ends = vec![0i32];
    for (queries, _) in asking {
        ends.push(ends[ends.len() - 1] + *queries as i32);
    }
    let asked = ends[asking.len()] as usize;
    let lens: Vec<i32> = asking.iter().map(|row| row.1 as i32).collect();
    let rows = [
        pair.put(&ends, 1, asking.len() + 1),
        pair.put(&lens, 1, asking.len()),
        pair.put(&table.repeat(asking.len()), asking.len(), blocks),
    ];
    let mut weights = |n: usize| -> Vec<Vec<u8>> {
        let mut one = |_| {
            (0..n * latent)
                .flat_map(|_| rounded(numbers.float() / 8.0, dtype).to_le_bytes())
                .collect()
        };
        (0..heads).map(&mut one).collect()
    };
    let (keys, values) = (weights(unturned), weights(value));
    let turned: Vec<Vec<u8>> = keys.iter().map(|key| transposed(key, latent)).collect();
    let seats = pair.put(seats, 1, seats.len());
    let exact = RowBounds::of(asking.iter().copied(), successive);
    let mut o = pair.poisoned(dtype, asked, heads * value);
    let mut apart = pair.poisoned(dtype, asked, heads * value);
    let mut alone = pair.poisoned(dtype, 1, heads * value);
    for at in 0..2 {
        let view: fn(&Twin) -> Mat<'_> = [Twin::gpu, Twin::cpu][at];
        let device: &dyn Kernels = [&pair.gpu as &dyn Kernels, &pair.cpu][at];
        let pack = |all: &[Vec<u8>], n: usize| {
            let view = |bytes| vec![HostMat::new(bytes, DType::F32, n, latent).unwrap()];
            let views: Vec<_> = all.iter().map(|bytes| view(bytes)).collect();
            device.pack_heads(&views, layouts[at].dtype).unwrap()
        };
        let (key, value) = (pack(&keys, unturned), pack(&values, value));
        let views =
            turned.iter().map(|key| vec![HostMat::new(key, DType::F32, latent, unturned).unwrap()]);
        let transposed = device.pack_heads(&views.collect::<Vec<_>>(), layouts[at].dtype).unwrap();
        let args = LatentWrite {
            kv: view(&kv),
            norm: view(&norm),
            eps: 1e-6,
            rope: Rope { cos: view(&cos), sin: view(&sin) },
            positions: view(&positions),
            slots: view(&slots),
            heads,
            layer: 1,
        };
        let out = if at == 0 { q.gpu_mut() } else { q.cpu_mut() };
        device.latent_write(&S, out, (&mut pools[at], &layouts[at]), &args).unwrap();
        let args = LatentAttention {
            q: view(&q).rows_from(kept - asked, asked),
            rows: BatchRows {
                cu_q: view(&rows[0]),
                context_lens: view(&rows[1]),
                block_tables: view(&rows[2]),
                table_rows: Some(view(&seats)),
                bounds: RowBounds { decode_rows, longest_q: 5, ..exact },
            },
            heads: LatentHeads {
                key: &key,
                key_transposed: (layouts[at].dtype != DType::F32).then_some(&transposed),
                value: &value,
            },
            layer: 1,
            scale: 0.2,
            first,
        };
        let out = if at == 0 { o.gpu_mut() } else { o.cpu_mut() };
        device.latent_attention(&S, out, (&pools[at], &layouts[at]), &args).unwrap();
        if at == 0 {
            let bounds = RowBounds { successive: 1, ..args.rows.bounds };
            let one_by_one = LatentAttention { rows: BatchRows { bounds, ..args.rows }, ..args };
            let pool = (&pools[0], &layout);
            device.latent_attention(&S, apart.gpu_mut(), pool, &one_by_one).unwrap();
            let rows = BatchRows {
                cu_q: args.rows.cu_q.columns(0, 2),
                context_lens: args.rows.context_lens.columns(0, 1),
                table_rows: args.rows.table_rows.map(|seats| seats.columns(0, 1)),
                bounds: RowBounds {
                    decode_rows: decode_rows.min(1),
                    short_tokens: 1,
                    ..args.rows.bounds
                },
                ..args.rows
            };
            let args = LatentAttention { q: args.q.rows_from(0, 1), rows, ..args };
            device.latent_attention(&S, alone.gpu_mut(), (&pools[0], &layout), &args).unwrap();
        }
    }
    pair.check(&format!("{sizes:?} {dtype:?} queries"), &q, tolerance(dtype));
    // In f32 and of long rows the CPU makes keys and values and rounds these.
    let what = format!("{sizes:?} {dtype:?}");
    let [got, expected] = pair.read_floats(&o);
    let [alone, _] = pair.read_floats(&alone);
    let [apart, _] = pair.read_floats(&apart);
    // Warpgroups, which there are where waves are narrow, cut contexts by all that are in the step.
    let in_groups = pair.gpu.wave() == 32 && dtype != DType::F32 && rotary.is_multiple_of(64);
    let differ = [error(&apart, &got), error(&alone, &got[..heads * value])];
    let most = if in_groups { tolerance(dtype) } else { 0.0 };
    assert!(differ.iter().all(|by| *by <= most), "{what}: one by one, the first alone: {differ:?}");
    for (row, (_, context)) in asking.iter().enumerate().filter(|(_, row)| row.1 == 0) {
        let own = ends[row] as usize * heads * value..ends[row + 1] as usize * heads * value;
        assert!(got[own].iter().all(|y| *y == 0.0), "{what}: row {row} of {context} keys");
    }
    let error = error(&got, &expected);
    assert!(error <= 3.0 * tolerance(dtype), "{what}: {error}");
}

#[test]
fn latent_attention_agrees_with_the_cpu() {
    for pair in &pairs() {
        check(pair, [3, 32, 8, 16, 16, 6], (SHORT, 0), DType::F32);
        // Shapes that the fast kernels leave out.
        check(pair, [2, 96, 16, 24, 40, 16], (SHORT, 2), DType::BF16);
    }
}

#[test]
fn latents_on_matrix_units_agree_with_the_cpu() {
    for pair in &pairs() {
        check(pair, [2, 512, 64, 128, 128, 16], (SHORT, 2), DType::BF16);
        check(pair, [17, 128, 32, 32, 48, 32], (LONG, 4), DType::BF16);
    }
}

#[test]
fn positions_that_nobody_sees_change_nothing() {
    let short: Rows<'_> = &[(1, 75), (1, 2), (1, 0), (5, 70), (3, 4)];
    let long: Rows<'_> = &[(1, 600), (1, 257), (1, 0), (1, 2), (3, 130)];
    for pair in &pairs() {
        check_from(pair, [3, 32, 8, 16, 16, 6], (short, 0), DType::F32, 1);
        check_from(pair, [2, 96, 16, 24, 40, 16], (short, 3), DType::BF16, 1);
        check_from(pair, [17, 128, 32, 32, 48, 32], (long, 4), DType::BF16, 1);
    }
}

/// Rows of requests with drafts: some of several splits, some whose tokens are cut differently, one of more tokens than are taken
/// together, requests side by side whose contexts look like one's, and padding.
#[test]
fn successive_tokens_of_a_request_are_as_rows_one_by_one() {
    let few = [(598..602, 0), (254..259, 3), (0..1, 0), (14..18, 1), (18..19, 2), (300..301, 5)];
    let many = (0..18).map(|i| (40 + i..42 + i, i as i32));
    let many: Vec<_> = many.chain([(1023..1026, 19)]).collect();
    for pair in &pairs() {
        let check = |sizes, requests: &[(Range<usize>, i32)], successive| {
            let rows = |(contexts, seat): &(Range<usize>, i32)| {
                let seat = *seat;
                contexts.clone().map(move |context| ((1, context), seat))
            };
            let (rows, seats): (Vec<_>, Vec<_>) = requests.iter().flat_map(rows).unzip();
            let asked = (&rows[..], rows.len());
            check_of(pair, sizes, asked, DType::BF16, (0, &seats, successive));
        };
        check([17, 128, 32, 32, 48, 32], &few, 5);
        check([16, 128, 64, 32, 16, 16], &few, 4);
        check([5, 128, 64, 32, 32, 48], &few, 5);
        check([70, 128, 64, 32, 16, 16], &few, 2);
        check([32, 128, 64, 32, 16, 16], &many, 2);
        // So few that there is a block for each.
        check([16, 128, 64, 32, 16, 16], &few[3..5], 4);
    }
}

/// On NVIDIA's warpgroups where there are some: tiles of 64 heads, whole and in part, rows of several splits, of one, and of none; contexts
/// of which none is cut, or only the long ones, and padding.
#[test]
fn latents_in_groups_agree_with_the_cpu() {
    let mut many = [(1, 40); 18];
    (many[3].1, many[9].1, many[17].1) = (1030, 0, 129);
    let context = |i: usize| if i < 32 { 1 + i * 37 % 32 * 40 } else { 0 };
    let padded: Vec<_> = (0..38).map(|i| (1, context(i))).collect();
    for pair in &pairs() {
        check(pair, [70, 128, 64, 32, 16, 16], (LONG, 4), DType::BF16);
        check(pair, [5, 256, 64, 32, 32, 48], (SHORT, 0), DType::BF16);
        check(pair, [3, 128, 128, 32, 16, 32], (&many, many.len()), DType::BF16);
        check(pair, [66, 128, 64, 32, 16, 16], (&many, many.len()), DType::BF16);
        check(pair, [3, 128, 64, 32, 16, 16], (&padded, padded.len()), DType::BF16);
    }
}
