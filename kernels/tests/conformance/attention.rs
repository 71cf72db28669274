//! KV write and paged attention on the CPU: prefill and decode rows in one step, random block tables, several
//! GQA ratios and block sizes.

use device::{Buffer, CpuIsa, DeviceDriver, DeviceError, DeviceStream, MatMut, MatRef, bf16, f16};
use kernels::cpu::CpuBackend;
use kernels::{
    AttentionKeyRange, AttentionMetadata, KvCacheScales, KvLayout, KvTileOrder, PagedAttention,
    PagedAttentionArgs, QkNormRopeArgs, QkNormRopeKvWrite, RopeCosSin,
};

use crate::support::{CpuTestFloat, SeededNumbers, cast, device, devices, error, tolerance};

const S: DeviceStream = DeviceStream(0);
/// Number of positions in the RoPE tables.
const POSITIONS: usize = 512;

/// A small attention case: head counts, pool layout, norm weights, and requests with the QKV projections of
/// every token.
struct AttentionConformanceCase {
    heads: usize,
    /// Keys that queries attend to.
    keys: AttentionKeyRange,
    /// Attention sink of each query head; empty = no sinks.
    sinks: Vec<f32>,
    layout: KvLayout,
    rotary: usize,
    /// Per request: QKV projections `[tokens, (heads + 2 * kv_heads) * head_dim]`, and its block table.
    requests: Vec<(Vec<f32>, Vec<i32>)>,
    norms: Option<(Vec<f32>, Vec<f32>)>,
    /// Tables of cosines and of sines: `[POSITIONS, rotary / 2]`.
    rope: (Vec<f32>, Vec<f32>),
}

/// Query heads, KV heads and channels per head.
#[derive(Debug, Clone, Copy)]
struct AttentionHeadShape {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl AttentionHeadShape {
    const fn new(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self { heads, kv_heads, head_dim }
    }
}

/// The tokens `from..to` of request `request`, computed in one step.
#[derive(Clone, Copy)]
struct RequestChunk {
    request: usize,
    from: usize,
    to: usize,
}

const EPS: f32 = 1e-6;

impl AttentionConformanceCase {
    fn new<T: CpuTestFloat>(
        seed: u64,
        counts: AttentionHeadShape,
        block_tokens: usize,
        lens: &[usize],
    ) -> Self {
        let AttentionHeadShape { heads, kv_heads, head_dim } = counts;
        let mut numbers = SeededNumbers::new(seed);
        let width = (heads + 2 * kv_heads) * head_dim;
        let needed: usize = lens.iter().map(|len| len.div_ceil(block_tokens)).sum();
        let layout = KvLayout {
            layers: 2,
            blocks: needed + 3,
            block_tokens,
            kv_heads,
            head_dim,
            dtype: T::DTYPE,
            order: KvTileOrder::LaneInterleaved,
        };
        let mut free: Vec<i32> = (0..layout.blocks as i32).collect();
        let requests = lens
            .iter()
            .map(|&len| {
                let qkv = numbers.floats(len * width);
                let mut take = || free.swap_remove(numbers.below(free.len()));
                (qkv, (0..len.div_ceil(block_tokens)).map(|_| take()).collect())
            })
            .collect();
        let norms = seed.is_multiple_of(2).then(|| {
            let mut weight = || numbers.floats(head_dim).iter().map(|w| 1.0 + w / 4.0).collect();
            (weight(), weight())
        });
        let rotary = if seed.is_multiple_of(3) { head_dim / 2 } else { head_dim };
        Self {
            heads,
            keys: AttentionKeyRange::default(),
            sinks: Vec::new(),
            layout,
            rotary,
            requests,
            norms,
            rope: rope(rotary),
        }
    }

    fn width(&self) -> usize {
        (self.heads + 2 * self.layout.kv_heads) * self.layout.head_dim
    }

    fn slot(&self, request: usize, position: usize) -> i64 {
        let bs = self.layout.block_tokens;
        i64::from(self.requests[request].1[position / bs]) * bs as i64 + (position % bs) as i64
    }

    /// Returns the query or key of one head at a position after norm and RoPE, computed in f64 and rounded
    /// where the kernel rounds.
    fn rotated<T: CpuTestFloat>(&self, request: usize, position: usize, head: usize) -> Vec<f64> {
        let dim = self.layout.head_dim;
        let raw = &self.requests[request].0[position * self.width() + head * dim..][..dim];
        let mut x: Vec<f64> = raw.iter().map(|x| f64::from(*x)).collect();
        if let Some((q, k)) = &self.norms {
            let w = if head < self.heads { q } else { k };
            let mean = x.iter().map(|x| x * x).sum::<f64>() / dim as f64;
            let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
            for (x, w) in x.iter_mut().zip(w) {
                let unit = T::of((*x * scale) as f32).value();
                *x = f64::from(T::of(T::of(*w).value() * unit).value());
            }
        }
        let (cos, sin) = &self.rope;
        let half = self.rotary / 2;
        for i in 0..half {
            let (c, s) = (cos[position * half + i], sin[position * half + i]);
            let (low, high) = (x[i], x[i + half]);
            x[i] = low * f64::from(c) - high * f64::from(s);
            x[i + half] = high * f64::from(c) + low * f64::from(s);
        }
        x.iter().map(|x| f64::from(T::of(*x as f32).value())).collect()
    }

    /// Returns the keys of a request after norm and RoPE: `[kv_heads, positions, head_dim]`.
    fn keys<T: CpuTestFloat>(&self, request: usize) -> Vec<Vec<Vec<f64>>> {
        let len = self.requests[request].0.len() / self.width();
        let key = |head, p| self.rotated::<T>(request, p, self.heads + head);
        (0..self.layout.kv_heads).map(|head| (0..len).map(|p| key(head, p)).collect()).collect()
    }

    /// Returns the attention output of one token, computed in f64 by the formula.
    fn expected<T: CpuTestFloat>(
        &self,
        request: usize,
        position: usize,
        keys: &[Vec<Vec<f64>>],
    ) -> Vec<f64> {
        let (dim, group) = (self.layout.head_dim, self.heads / self.layout.kv_heads);
        let mut out = Vec::new();
        for head in 0..self.heads {
            let value_head = self.heads + self.layout.kv_heads + head / group;
            let q = self.rotated::<T>(request, position, head);
            let first = self.keys.first_key(position);
            let scores: Vec<f64> = keys[head / group][first..=position]
                .iter()
                .map(|k| q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() * f64::from(self.scale()))
                .collect();
            let sink = self.sinks.get(head).map(|sink| f64::from(*sink));
            let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - max).exp());
            let mut o = vec![0.0; dim];
            for (p, w) in (first..).zip(&weights) {
                let at = p * self.width() + value_head * dim;
                for (o, v) in o.iter_mut().zip(&self.requests[request].0[at..]) {
                    *o += w / sum * f64::from(*v);
                }
            }
            out.extend(o);
        }
        out
    }

    fn scale(&self) -> f32 {
        (self.layout.head_dim as f32).powf(-0.5)
    }

    fn pool(&self, device: &CpuBackend) -> Buffer {
        device.alloc(self.layout.bytes()).unwrap()
    }

    /// Runs KV write and attention of `chunks` as one step, in layer 1 of the KV pool; returns the outputs
    /// `[tokens, heads * head_dim]`.
    fn step<T: CpuTestFloat>(
        &self,
        device: &CpuBackend,
        pool: &mut Buffer,
        chunks: &[RequestChunk],
    ) -> Vec<T> {
        let (mut qkv, mut positions, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        let (mut cu_q, mut context_lens, mut tables) = (vec![0], Vec::new(), Vec::new());
        let widest = self.requests.iter().map(|r| r.1.len()).max().unwrap();
        for &RequestChunk { request, from, to } in chunks {
            let (projections, table) = &self.requests[request];
            qkv.extend(cast::<T>(&projections[from * self.width()..to * self.width()]));
            positions.extend(from as i32..to as i32);
            slots.extend((from..to).map(|p| self.slot(request, p)));
            cu_q.push(positions.len() as i32);
            context_lens.push(to as i32);
            let used = to.div_ceil(self.layout.block_tokens);
            // The kernel must not read block table entries before the block of the first key or after the
            // last block of a row, so these are invalid.
            let unused = self.keys.first_key(from) / self.layout.block_tokens;
            tables.extend(std::iter::repeat_n(-7, unused));
            tables.extend_from_slice(&table[unused..used]);
            tables.extend(std::iter::repeat_n(-7, widest - used));
        }
        let tokens = positions.len();
        let dim = self.layout.head_dim;
        let (cos, sin) = &self.rope;
        let norms = self.norms.as_ref().map(|(q, k)| (cast::<T>(q), cast::<T>(k)));
        let mut q = vec![T::of(0.0); tokens * self.heads * dim];
        let args = QkNormRopeArgs {
            qkv: MatRef::of(&qkv, tokens, self.width()).unwrap(),
            q_norm: norms.as_ref().map(|(q, _)| MatRef::of(q, 1, dim).unwrap()),
            k_norm: norms.as_ref().map(|(_, k)| MatRef::of(k, 1, dim).unwrap()),
            eps: EPS,
            rope: RopeCosSin {
                cos: MatRef::of(cos, POSITIONS, self.rotary / 2).unwrap(),
                sin: MatRef::of(sin, POSITIONS, self.rotary / 2).unwrap(),
            },
            positions: MatRef::of(&positions, 1, tokens).unwrap(),
            slots: MatRef::of(&slots, 1, tokens).unwrap(),
            heads: self.heads,
            layer: 1,
            kv_scales: KvCacheScales::UNIT,
        };
        let out = MatMut::of(&mut q, tokens, self.heads * dim).unwrap();
        device
            .launch(&S, QkNormRopeKvWrite { q: out, pool, layout: &self.layout, args: &args })
            .unwrap();
        let rows = chunks.len();
        let args = PagedAttentionArgs {
            q: MatRef::of(&q, tokens, self.heads * dim).unwrap(),
            rows: AttentionMetadata {
                cu_q: MatRef::of(&cu_q, 1, rows + 1).unwrap(),
                context_lens: MatRef::of(&context_lens, 1, rows).unwrap(),
                block_tables: MatRef::of(&tables, rows, widest).unwrap(),
                table_rows: None,
                bounds: kernels::BatchUpperBounds::of_any(
                    tokens,
                    rows,
                    widest * self.layout.block_tokens,
                ),
            },
            heads: self.heads,
            layer: 1,
            scale: self.scale(),
            keys: self.keys,
            sinks: (!self.sinks.is_empty())
                .then(|| MatRef::of(&self.sinks, 1, self.heads).unwrap()),
        };
        let mut o = vec![T::of(0.0); tokens * self.heads * dim];
        let out = MatMut::of(&mut o, tokens, self.heads * dim).unwrap();
        device
            .launch(&S, PagedAttention { o: out, pool, layout: &self.layout, args: &args })
            .unwrap();
        o
    }

    /// Returns one chunk per request that contains all of its tokens.
    fn whole_requests(&self) -> Vec<RequestChunk> {
        let bs = self.layout.block_tokens;
        let len = |i: usize| self.requests[i].0.len() / self.width();
        let whole = |request| RequestChunk { request, from: 0, to: len(request) };
        let chunks: Vec<_> = (0..self.requests.len()).map(whole).collect();
        assert!(chunks.iter().all(|c| c.to.div_ceil(bs) == self.requests[c.request].1.len()));
        chunks
    }
}

/// Returns the RoPE tables of cosines and sines of all positions, for `rotary` channels and base 10,000.
fn rope(rotary: usize) -> (Vec<f32>, Vec<f32>) {
    let half = rotary / 2;
    let angle = |i: usize| (i / half) as f64 * 1e4f64.powf(-((i % half) as f64) / half as f64);
    let table = |f: fn(f64) -> f64| (0..POSITIONS * half).map(|i| f(angle(i)) as f32).collect();
    (table(f64::cos), table(f64::sin))
}

fn check<T: CpuTestFloat>(case: &AttentionConformanceCase, what: &str) {
    let mut chunks = case.whole_requests();
    for chunk in &mut chunks {
        chunk.from = case.keys.first_position; // No query may be before the first visible position.
    }
    let expected: Vec<f64> = chunks
        .iter()
        .flat_map(|&RequestChunk { request, from, to }| {
            let keys = case.keys::<T>(request);
            (from..to).flat_map(move |p| case.expected::<T>(request, p, &keys))
        })
        .collect();
    for device in devices(2) {
        let got = case.step::<T>(&device, &mut case.pool(&device), &chunks);
        let worst = error(&got, &expected);
        assert!(worst < tolerance::<T>(), "{what} {:?} {:?}: {worst:e}", T::DTYPE, device.isa());
    }
}

/// Compares with the f64 reference the attention of an MTP module, which has no KV entry at a request's first
/// position.
#[test]
fn attention_skips_masked_first_position() {
    for heads in [AttentionHeadShape::new(4, 2, 64), AttentionHeadShape::new(2, 1, 80)] {
        let lens = &[2usize, 17, 70, 130][..];
        check::<f32>(
            &AttentionConformanceCase {
                keys: AttentionKeyRange { first_position: 1, window: None },
                ..AttentionConformanceCase::new::<f32>(5, heads, 16, lens)
            },
            "from 1",
        );
        check::<bf16>(
            &AttentionConformanceCase {
                keys: AttentionKeyRange { first_position: 1, window: None },
                ..AttentionConformanceCase::new::<bf16>(5, heads, 16, lens)
            },
            "from 1",
        );
    }
}

/// Returns cases with a sliding window and blocks of 2, 6, 16 and 48 tokens, half of which have sinks.
fn windowed_cases<T: CpuTestFloat>(window: usize) -> Vec<AttentionConformanceCase> {
    let shapes = [
        (AttentionHeadShape::new(4, 2, 16), 16, [1, 17, 70, 200]),
        (AttentionHeadShape::new(3, 1, 64), 2, [2, 63, 65, 90]),
        (AttentionHeadShape::new(6, 2, 80), 48, [5, 64, 97, 150]),
        (AttentionHeadShape::new(2, 1, 256), 6, [1, 31, 66, 130]),
    ];
    let cases = (0..).zip(shapes).map(|(seed, (heads, block_tokens, lens))| {
        let mut case = AttentionConformanceCase::new::<T>(seed, heads, block_tokens, &lens);
        case.keys.window = Some(window);
        if (seed as usize + window).is_multiple_of(2) {
            // The last sink is far above every score, the first one far below.
            case.sinks = (0..heads.heads).map(|head| head as f32 * 30.0 - 20.0).collect();
        }
        case
    });
    cases.collect()
}

const WINDOWS: [usize; 7] = [1, 8, 16, 63, 64, 65, 1000];

fn check_windowed<T: CpuTestFloat>(window: usize, what: &str) {
    for case in windowed_cases::<T>(window) {
        check::<T>(&case, what);
    }
}

#[test]
fn sliding_windows_and_sinks_agree_with_the_formula() {
    for window in WINDOWS {
        let what = format!("window {window}");
        check_windowed::<f32>(window, &what);
        check_windowed::<bf16>(window, &what);
        check_windowed::<f16>(window, &what);
    }
}

/// With a sliding window, the output of a token has the same bits for every division into chunks. Each chunk
/// finds NaN in the KV blocks before its first key, as other requests may leave there.
fn check_windowed_chunks<T: CpuTestFloat>(case: &AttentionConformanceCase) {
    let layout = &case.layout;
    // All bits set are a NaN in every type.
    let nan = vec![u8::MAX; layout.bytes_per_block() / layout.layers];
    for device in devices(1) {
        let whole = case.step::<T>(&device, &mut case.pool(&device), &case.whole_requests());
        let mut begin = 0;
        for chunk in case.whole_requests() {
            let outputs = &whole[begin * case.heads * layout.head_dim..];
            begin += chunk.to;
            for size in [1, 7, 64] {
                let mut pool = case.pool(&device);
                for from in (0..chunk.to).step_by(size) {
                    let to = chunk.to.min(from + size);
                    let got =
                        case.step::<T>(&device, &mut pool, &[RequestChunk { from, to, ..chunk }]);
                    let at = from * case.heads * layout.head_dim;
                    assert!(got == outputs[at..at + got.len()], "{from} to {to}, {:?}", case.keys);
                    let table = &case.requests[chunk.request].1;
                    for &block in &table[..case.keys.first_key(to) / layout.block_tokens] {
                        let tile = layout.key_tile(1, block as usize, 0) * T::DTYPE.bytes();
                        device.upload(&mut pool, tile, &nan).unwrap();
                    }
                }
            }
        }
    }
}

#[test]
fn chunks_with_sliding_windows_match_whole_prompts_bitwise() {
    for window in WINDOWS {
        windowed_cases::<f32>(window).iter().for_each(check_windowed_chunks::<f32>);
        windowed_cases::<bf16>(window).iter().for_each(check_windowed_chunks::<bf16>);
    }
}

#[test]
fn agrees_with_the_formula() {
    let shapes = [
        ((4, 2, 16), 16, &[1usize, 17, 70][..]),
        ((2, 2, 64), 16, &[33, 2]),
        ((8, 1, 64), 32, &[40, 5]),
        ((16, 1, 32), 16, &[13]),
        ((4, 2, 128), 16, &[66]),
        ((2, 1, 256), 16, &[20]),
        ((2, 1, 512), 16, &[20]),
        ((6, 2, 80), 48, &[50, 3]),
        ((4, 4, 48), 4, &[9, 66]),
        ((3, 1, 16), 2, &[7]),
        ((2, 1, 32), 6, &[31]),
    ];
    for (seed, ((heads, kv_heads, head_dim), block_tokens, lens)) in shapes.into_iter().enumerate()
    {
        let heads = AttentionHeadShape { heads, kv_heads, head_dim };
        let what = format!("{heads:?}, blocks of {block_tokens}");
        check::<f32>(
            &AttentionConformanceCase::new::<f32>(seed as u64, heads, block_tokens, lens),
            &what,
        );
        check::<bf16>(
            &AttentionConformanceCase::new::<bf16>(seed as u64, heads, block_tokens, lens),
            &what,
        );
        check::<f16>(
            &AttentionConformanceCase::new::<f16>(seed as u64, heads, block_tokens, lens),
            &what,
        );
    }
}

/// Checks that whole prefill, chunked prefill, decode and mixed batches give the same bits for every token.
fn check_invariance<T: CpuTestFloat>(heads: AttentionHeadShape, block_tokens: usize, isa: CpuIsa) {
    let lens = [150usize, 37, 65];
    let case = AttentionConformanceCase::new::<T>(4, heads, block_tokens, &lens);
    let reference = device(1, isa);
    let mut expected = Vec::new();
    for chunk in case.whole_requests() {
        let mut pool = case.pool(&reference);
        expected.push(case.step::<T>(&reference, &mut pool, &[chunk]));
    }
    let width = heads.heads * heads.head_dim;
    let token = |i: usize, p: usize| &expected[i][p * width..(p + 1) * width];
    for threads in [1, 2, 3] {
        let device = device(threads, isa);
        for chunk_len in [1, 7, 16, 64, 1000] {
            let mut pool = case.pool(&device);
            let mut done = [0; 3];
            while done.iter().zip(&lens).any(|(d, l)| d < l) {
                let next = (0..3).filter(|&i| done[i] < lens[i]);
                let chunk = |request: usize| {
                    let from = done[request];
                    RequestChunk { request, from, to: lens[request].min(from + chunk_len) }
                };
                let chunks: Vec<_> = next.map(chunk).collect();
                let got = case.step::<T>(&device, &mut pool, &chunks);
                let tokens =
                    chunks.iter().flat_map(|c| (c.from..c.to).map(move |p| (c.request, p)));
                for ((i, p), got) in tokens.zip(got.chunks_exact(width)) {
                    assert_eq!(got, token(i, p), "token {p} of {i}, chunks of {chunk_len}");
                }
                for chunk in chunks {
                    done[chunk.request] = chunk.to;
                }
            }
        }
    }
}

#[test]
fn a_token_does_not_depend_on_chunks_batch_or_threads() {
    for isa in CpuIsa::ALL.into_iter().filter(|isa| isa.available()) {
        check_invariance::<f32>(AttentionHeadShape::new(4, 2, 64), 16, isa);
        check_invariance::<bf16>(AttentionHeadShape::new(4, 2, 64), 16, isa);
        check_invariance::<f16>(AttentionHeadShape::new(4, 2, 64), 16, isa);
        check_invariance::<bf16>(AttentionHeadShape::new(3, 1, 32), 6, isa);
        check_invariance::<f16>(AttentionHeadShape::new(3, 1, 32), 6, isa);
    }
}

/// Checks that NaNs that the previous request left in a KV block do not affect the next request that uses the
/// block, also where position 0 is never written.
fn check_stale<T: CpuTestFloat>(first_position: usize) {
    for device in devices(2) {
        let mut case =
            AttentionConformanceCase::new::<T>(2, AttentionHeadShape::new(4, 2, 64), 16, &[21]);
        case.keys.first_position = first_position;
        let mut whole = case.whole_requests();
        whole[0].from = first_position;
        let clean = case.step::<T>(&device, &mut case.pool(&device), &whole);
        let mut pool = case.pool(&device);
        let poison: Vec<u8> =
            std::iter::repeat_n(stored(T::of(f32::NAN)), case.layout.bytes() / T::DTYPE.bytes())
                .flatten()
                .collect();
        device.upload(&mut pool, 0, &poison).unwrap();
        assert_eq!(case.step::<T>(&device, &mut pool, &whole), clean);
    }
}

#[test]
fn stale_blocks_do_not_poison() {
    for first_position in [0, 1] {
        check_stale::<f32>(first_position);
        check_stale::<bf16>(first_position);
        check_stale::<f16>(first_position);
    }
}

/// Checks that keys and values that are exact in fp8 give the same bits from an fp8 pool as from a pool of
/// the activation type.
fn check_fp8<T: CpuTestFloat>(block_tokens: usize, window: Option<usize>) {
    let mut case = AttentionConformanceCase::new::<T>(
        1,
        AttentionHeadShape::new(4, 2, 32),
        block_tokens,
        &[1, 70, 19],
    );
    let eighths = |x: &mut f32| *x = (*x * 8.0).round() / 8.0;
    case.requests.iter_mut().flat_map(|(qkv, _)| qkv).for_each(eighths);
    case.rope.0.fill(1.0);
    case.rope.1.fill(0.0);
    case.keys.window = window;
    for device in devices(2) {
        case.layout.dtype = T::DTYPE;
        let same = case.step::<T>(&device, &mut case.pool(&device), &case.whole_requests());
        case.layout.dtype = device::DType::F8E4M3;
        let fp8 = case.step::<T>(&device, &mut case.pool(&device), &case.whole_requests());
        assert_eq!(fp8, same, "{:?} on {:?}", T::DTYPE, device.isa());
    }
}

#[test]
fn a_pool_in_fp8_serves_every_model_type() {
    for block_tokens in [16, 6] {
        for window in [None, Some(21)] {
            check_fp8::<f32>(block_tokens, window);
            check_fp8::<bf16>(block_tokens, window);
            check_fp8::<f16>(block_tokens, window);
        }
    }
}

/// Inputs of a KV write without RoPE: four tokens of two query heads and two KV heads of 16 channels, for a
/// pool of three blocks.
struct KvWriteCase<T> {
    layout: KvLayout,
    qkv: Vec<T>,
}

impl<T: CpuTestFloat> KvWriteCase<T> {
    const HEADS: usize = 2;
    const WIDTH: usize = 6 * 16;

    fn new() -> Self {
        let layout = KvLayout {
            layers: 2,
            blocks: 3,
            block_tokens: 16,
            kv_heads: 2,
            head_dim: 16,
            dtype: T::DTYPE,
            order: KvTileOrder::LaneInterleaved,
        };
        Self { layout, qkv: cast::<T>(&SeededNumbers::new(3).floats(4 * Self::WIDTH)) }
    }

    /// Writes the keys and values of layer 1 to the KV slots `slots`.
    fn store(
        &self,
        device: &CpuBackend,
        pool: &mut Buffer,
        slots: [i64; 4],
    ) -> Result<(), DeviceError> {
        let (cos, sin) = (vec![1.0f32; 8 * 8], vec![0.0f32; 8 * 8]);
        let mut q = vec![T::of(0.0); 4 * Self::HEADS * 16];
        let args = QkNormRopeArgs {
            qkv: MatRef::of(&self.qkv, 4, Self::WIDTH).unwrap(),
            q_norm: None,
            k_norm: None,
            eps: EPS,
            rope: RopeCosSin {
                cos: MatRef::of(&cos, 8, 8).unwrap(),
                sin: MatRef::of(&sin, 8, 8).unwrap(),
            },
            positions: MatRef::of(&[0, 1, 2, 3], 1, 4).unwrap(),
            slots: MatRef::of(&slots, 1, 4).unwrap(),
            heads: Self::HEADS,
            layer: 1,
            kv_scales: KvCacheScales::UNIT,
        };
        let out = MatMut::of(&mut q, 4, Self::HEADS * 16).unwrap();
        device.launch(&S, QkNormRopeKvWrite { q: out, pool, layout: &self.layout, args: &args })
    }

    /// Writes to `pool` (the bytes of a KV pool) the keys and values that `store` is expected to write.
    fn expect(&self, pool: &mut [u8], slots: [i64; 4]) {
        let size = T::DTYPE.bytes();
        for (t, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            let (block, row) = (slot as usize / 16, slot as usize % 16);
            for (head, d) in (0..2).flat_map(|head| (0..16).map(move |d| (head, d))) {
                let key = self.layout.key_tile(1, block, head) + self.layout.key(row, d);
                let value = self.layout.value_tile(1, block, head) + self.layout.value(row, d);
                for (offset, head) in [(key, 2 + head), (value, 4 + head)] {
                    let x = self.qkv[t * Self::WIDTH + head * 16 + d];
                    pool[offset * size..][..size].copy_from_slice(&stored(x));
                }
            }
        }
    }
}

/// Returns the bytes that represent `x` in a KV pool of type `T`.
fn stored<T: CpuTestFloat>(x: T) -> Vec<u8> {
    match T::DTYPE {
        device::DType::BF16 => bf16::from_f32(x.value()).to_le_bytes().to_vec(),
        device::DType::F16 => f16::from_f32(x.value()).to_le_bytes().to_vec(),
        _ => x.value().to_le_bytes().to_vec(),
    }
}

/// Checks that slot −1 writes nothing, that all bytes of other slots stay unchanged, and that the last slot
/// of the pool can be written.
fn check_slots<T: CpuTestFloat>() {
    let device = device(2, CpuIsa::detect());
    let case = KvWriteCase::<T>::new();
    let mut pool = device.alloc(case.layout.bytes()).unwrap();
    let sentinels = SeededNumbers::new(9).floats(case.layout.bytes() / T::DTYPE.bytes());
    let mut expected: Vec<u8> = cast::<T>(&sentinels).into_iter().flat_map(stored).collect();
    device.upload(&mut pool, 0, &expected).unwrap();
    let mut got = vec![0; expected.len()];
    case.store(&device, &mut pool, [-1; 4]).unwrap();
    device.download(&S, &pool, 0, &mut got).unwrap();
    assert_eq!(got, expected, "slot -1 stores nothing");

    let last = case.layout.slots() as i64 - 1;
    let slots = [last, -1, 5, 16];
    case.store(&device, &mut pool, slots).unwrap();
    case.expect(&mut expected, slots);
    device.download(&S, &pool, 0, &mut got).unwrap();
    assert_eq!(got, expected, "only the named slots change");
    let beyond = case.store(&device, &mut pool, [last + 1, -1, -1, -1]);
    assert!(matches!(beyond, Err(DeviceError::Index { .. })));
}

#[test]
fn only_named_slots_are_written() {
    check_slots::<f32>();
    check_slots::<bf16>();
    check_slots::<f16>();
}

#[test]
fn invalid_block_tables_are_rejected() {
    let device = device(1, CpuIsa::Portable);
    let layout = KvLayout {
        layers: 1,
        blocks: 2,
        block_tokens: 16,
        kv_heads: 1,
        head_dim: 16,
        dtype: device::DType::F32,
        order: KvTileOrder::LaneInterleaved,
    };
    let pool = device.alloc(layout.bytes()).unwrap();
    let q = [0.0f32; 3 * 16];
    let run = |cu_q: &[i32], context: &[i32], table: &[i32]| {
        let mut o = [0.0f32; 3 * 16];
        let args = PagedAttentionArgs {
            q: MatRef::of(&q, 3, 16).unwrap(),
            rows: AttentionMetadata {
                cu_q: MatRef::of(cu_q, 1, cu_q.len()).unwrap(),
                context_lens: MatRef::of(context, 1, context.len()).unwrap(),
                block_tables: MatRef::of(table, 1, table.len()).unwrap(),
                table_rows: None,
                bounds: kernels::BatchUpperBounds::of_any(
                    3,
                    context.len(),
                    table.len() * layout.block_tokens,
                ),
            },
            heads: 1,
            layer: 0,
            scale: 1.0,
            keys: AttentionKeyRange::default(),
            sinks: None,
        };
        let out = MatMut::of(&mut o, 3, 16).unwrap();
        device.launch(&S, PagedAttention { o: out, pool: &pool, layout: &layout, args: &args })
    };
    assert!(run(&[0, 3], &[20], &[1, 0]).is_ok());
    assert!(run(&[0, 3], &[20], &[1, 2]).is_err(), "block outside the pool");
    assert!(run(&[0, 3], &[20], &[1, -1]).is_err(), "negative block");
    assert!(run(&[0, 3], &[20], &[1]).is_err(), "table too short");
    assert!(run(&[0, 3], &[2], &[1]).is_err(), "context shorter than the chunk");
    assert!(run(&[0, 2], &[20], &[1, 0]).is_err(), "tokens without a row");
    assert!(run(&[0, 4], &[20], &[1, 0]).is_err(), "row without its tokens");
}
