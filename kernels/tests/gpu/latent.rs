//! Latent attention against the CPU: rows of one token and of many, blocks in any order, both types.

use kernels::{
    BatchRows, DType, Driver, HostMat, Kernels, LatentAttention, LatentHeads, LatentLayout,
    LatentWrite, Mat, Rope, RowBounds,
};

use crate::pair::{Pair, Twin, pairs, tolerance};
use crate::support::S;

/// Heads, latent, turned, unturned, value channels, block size.
type Sizes = [usize; 6];

/// Tokens stored. Rows see so many of the first ones, and ask for the last of these.
const TOKENS: usize = 75;
/// Queries and contexts of rows.
const ROWS: [(usize, usize); 4] = [(1, TOKENS), (1, 1), (5, 70), (3, 3)];

fn check(pair: &Pair, sizes: Sizes, dtype: DType) {
    let [heads, latent, rotary, unturned, value, block_tokens] = sizes;
    let mut numbers = pair.numbers((heads * latent) as u64);
    let blocks = TOKENS.div_ceil(block_tokens) + 1;
    let layout = LatentLayout { layers: 2, blocks, block_tokens, latent, rotary, dtype };
    let mut pools =
        [pair.gpu.alloc(layout.bytes()).unwrap(), pair.cpu.alloc(layout.bytes()).unwrap()];
    // An earlier owner left NaN everywhere.
    let stale = vec![0xff; layout.bytes()];
    pair.gpu.upload(&mut pools[0], 0, &stale).unwrap();
    pair.cpu.upload(&mut pools[1], 0, &stale).unwrap();
    let table: Vec<i32> = (0..blocks).map(|b| ((b * 5 + 3) % blocks) as i32).collect();
    let place = |t: usize| table[t / block_tokens] as usize * block_tokens + t % block_tokens;
    // The last token is kept nowhere: nobody sees it.
    let kept = TOKENS + 1;
    let slots: Vec<i64> = (0..TOKENS).map(|t| place(t) as i64).chain([-1]).collect();
    let positions: Vec<i32> = (0..kept as i32).collect();
    let (slots, positions) = (pair.put(&slots, 1, kept), pair.put(&positions, 1, kept));
    let kv = pair.random(&mut numbers, dtype, kept, latent + rotary);
    let norm = pair.random(&mut numbers, dtype, 1, latent);
    let [cos, sin] = [0; 2].map(|_| pair.random(&mut numbers, DType::F32, kept, rotary / 2));
    let mut q = pair.random(&mut numbers, dtype, kept, heads * (unturned + rotary));

    let mut ends = vec![0i32];
    for (queries, _) in ROWS {
        ends.push(ends[ends.len() - 1] + queries as i32);
    }
    let asked = ends[ROWS.len()] as usize;
    let lens = ROWS.map(|(_, context)| context as i32);
    let rows = [
        pair.put(&ends, 1, ROWS.len() + 1),
        pair.put(&lens, 1, ROWS.len()),
        pair.put(&table.repeat(ROWS.len()), ROWS.len(), blocks),
    ];
    let mut weights = |n: usize| -> Vec<Vec<u8>> {
        let mut one =
            |_| (0..n * latent).flat_map(|_| (numbers.float() / 8.0).to_le_bytes()).collect();
        (0..heads).map(&mut one).collect()
    };
    let (keys, values) = (weights(unturned), weights(value));
    let mut o = pair.poisoned(dtype, asked, heads * value);
    for at in 0..2 {
        let view: fn(&Twin) -> Mat<'_> = [Twin::gpu, Twin::cpu][at];
        let device: &dyn Kernels = [&pair.gpu as &dyn Kernels, &pair.cpu][at];
        let pack = |all: &[Vec<u8>], n: usize| {
            let view = |bytes| vec![HostMat::new(bytes, DType::F32, n, latent).unwrap()];
            let views: Vec<_> = all.iter().map(|bytes| view(bytes)).collect();
            device.pack_heads(&views, dtype).unwrap()
        };
        let (key, value) = (pack(&keys, unturned), pack(&values, value));
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
        device.latent_write(&S, out, (&mut pools[at], &layout), &args).unwrap();
        let args = LatentAttention {
            q: view(&q).rows_from(kept - asked, asked),
            rows: BatchRows {
                cu_q: view(&rows[0]),
                context_lens: view(&rows[1]),
                block_tables: view(&rows[2]),
                table_rows: None,
                bounds: RowBounds { decode_rows: 0, longest_q: 5, longest_context: TOKENS },
            },
            heads: LatentHeads { key: &key, key_transposed: None, value: &value },
            layer: 1,
            scale: 0.2,
        };
        let out = if at == 0 { o.gpu_mut() } else { o.cpu_mut() };
        device.latent_attention(&S, out, (&pools[at], &layout), &args).unwrap();
    }
    pair.check(&format!("{sizes:?} {dtype:?} queries"), &q, tolerance(dtype));
    // The CPU makes keys and values and rounds them; queries come to latents unrounded here.
    pair.check(&format!("{sizes:?} {dtype:?}"), &o, 3.0 * tolerance(dtype));
}

#[test]
fn latent_attention_agrees_with_the_cpu() {
    for pair in &pairs() {
        check(pair, [3, 32, 8, 16, 16, 6], DType::F32);
        check(pair, [2, 96, 16, 24, 40, 16], DType::BF16);
        check(pair, [1, 512, 64, 128, 128, 16], DType::BF16);
    }
}
