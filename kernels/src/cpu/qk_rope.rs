//! Fused QK norm, RoPE and KV write on the CPU.
//!
//! Each head of a token is first normalised, `x · rsqrt(mean(x²) + eps) · w`, if the model has QK norms. RoPE
//! then rotates channels `i` and `i + rotary / 2`: `(a, b) → (a cos − b sin, b cos + a sin)`. Arithmetic is
//! f32; results are rounded to the activation type after the normalisation (not with f32 norm weights), the
//! weight and the rotation.
//! Threads divide the heads, so no two threads write to one tile of the KV pool.

use device::{Buffer, DType, DeviceError, FloatElement, Fp8E4m3, MatMut, MatRef};

use super::backend::for_float;
use super::norm::{inverse_rms, normed};
use super::row_kernel::{RowKernel, dispatch};
use super::shared_rows::{SendPtr, SharedRows};
use crate::cpu::CpuBackend;
use crate::{CpuKernel, KvCacheScales, KvLayout, QkNormRopeArgs, QkNormRopeKvWrite};

const KERNEL: &str = "qk_norm_rope_kv_write";
/// Row kernel: normalises and rotates one head of one token.
struct QkNormRopeHead<'a, T, W> {
    y: &'a mut [T],
    x: &'a [T],
    norm: Option<&'a [W]>,
    eps: f32,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl<T: FloatElement, W: FloatElement> RowKernel for QkNormRopeHead<'_, T, W> {
    #[inline(always)]
    fn run(self) {
        if let Some(w) = self.norm {
            let scale = inverse_rms(self.x, self.eps);
            for ((y, x), w) in self.y.iter_mut().zip(self.x).zip(w) {
                *y = normed(*x, scale, *w);
            }
        } else {
            self.y.copy_from_slice(self.x);
        }
        let half = self.cos.len();
        let (low, rest) = self.y.split_at_mut(half);
        for (((low, high), cos), sin) in low.iter_mut().zip(rest).zip(self.cos).zip(self.sin) {
            let (a, b) = (low.load(), high.load());
            *low = T::store(a * cos - b * sin);
            *high = T::store(b * cos + a * sin);
        }
    }
}

impl CpuBackend {
    fn norm_rope_and_store<T: FloatElement, W: FloatElement>(
        &self,
        q: &mut MatMut<'_>,
        kv: &mut Buffer,
        layout: &KvLayout,
        args: &QkNormRopeArgs<'_>,
    ) {
        let heads = args.heads + 2 * layout.kv_heads;
        let tokens = args.qkv.rows();
        let call = QkRopeLaunchArgs {
            args,
            layout,
            pool: SendPtr(kv.as_mut_ptr().cast::<T>()),
            isa: self.isa(),
        };
        let out = SharedRows::<T>::new(q);
        let single_thread = tokens * args.qkv.cols() < super::elementwise::MIN_ELEMENTS;
        let job = |range: std::ops::Range<usize>| {
            let mut key = vec![T::store(0.0); layout.head_dim];
            for t in 0..tokens {
                for head in range.clone() {
                    if head < args.heads {
                        let dim = layout.head_dim;
                        // SAFETY: each head's columns belong to one thread.
                        let y = unsafe { out.part(t, head * dim, dim) };
                        call.norm_rope::<W>(y, t, head, args.q_norm);
                        call.scale_query(y, head);
                    } else if head < args.heads + layout.kv_heads {
                        call.norm_rope::<W>(&mut key, t, head, args.k_norm);
                        call.store_key(&key, t, head - args.heads);
                    } else {
                        call.store_value(t, head - args.heads - layout.kv_heads);
                    }
                }
            }
        };
        self.threads().split(heads, 1, if single_thread { usize::MAX } else { 0 }, &job);
    }
}

impl CpuKernel for QkNormRopeKvWrite<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut q, pool: kv, layout, args } = self;
        check_indices(layout, args)?;
        for_float!(KERNEL, q.dtype(), T => match args.norm_dtype() {
            Some(DType::F32) => cpu.norm_rope_and_store::<T, f32>(&mut q, kv, layout, args),
            _ => cpu.norm_rope_and_store::<T, T>(&mut q, kv, layout, args),
        });
        Ok(())
    }
}

/// Row kernel: writes the value of one token to a value tile. `rows` is the memory of a pair of tile rows;
/// the token has its second row if `odd` is true, otherwise its first row. In bf16 the elements of the two
/// rows alternate; in other types each row is contiguous. The row of the other token does not change.
struct ValueRowStore<'a, T> {
    rows: &'a mut [T],
    x: &'a [T],
    odd: bool,
}

impl<T: FloatElement> RowKernel for ValueRowStore<'_, T> {
    #[inline(always)]
    fn run(self) {
        if T::DTYPE != DType::BF16 {
            let (even, odd) = self.rows.split_at_mut(self.x.len());
            return if self.odd { odd } else { even }.copy_from_slice(self.x);
        }
        for (pair, x) in self.rows.as_chunks_mut::<2>().0.iter_mut().zip(self.x) {
            *pair = if self.odd { [pair[0], *x] } else { [*x, pair[1]] };
        }
    }
}

/// Arguments of one launch of the fused Q/K norm, RoPE and KV write, shared by all threads.
struct QkRopeLaunchArgs<'a, T> {
    args: &'a QkNormRopeArgs<'a>,
    layout: &'a KvLayout,
    pool: SendPtr<T>,
    isa: device::CpuIsa,
}

impl<T: FloatElement> QkRopeLaunchArgs<'_, T> {
    /// QKV projections of token `t` for head `head`; query heads are numbered first, then key heads, then
    /// value heads.
    fn head(&self, t: usize, head: usize) -> &[T] {
        let dim = self.layout.head_dim;
        &self.args.qkv.row::<T>(t)[head * dim..][..dim]
    }

    fn norm_rope<W: FloatElement>(
        &self,
        y: &mut [T],
        t: usize,
        head: usize,
        norm: Option<MatRef<'_>>,
    ) {
        let position = self.args.positions.row::<i32>(0)[t] as usize;
        dispatch(
            self.isa,
            QkNormRopeHead {
                y,
                x: self.head(t, head),
                norm: norm.map(|w| w.row::<W>(0)),
                eps: self.args.eps,
                cos: self.args.rope.cos.row(position),
                sin: self.args.rope.sin.row(position),
            },
        );
    }

    /// Multiplies a query by the factor of query head `head`, if heads have factors.
    fn scale_query(&self, y: &mut [T], head: usize) {
        let KvCacheScales::Heads(factors) = self.args.kv_scales else { return };
        let factor = factors.row::<f32>(0)[head];
        for x in y {
            *x = T::store(x.load() * factor);
        }
    }

    /// Factor of the keys of KV head `head`.
    fn key_factor(&self, head: usize) -> f32 {
        match self.args.kv_scales {
            KvCacheScales::Layer { key, .. } => 1.0 / key,
            KvCacheScales::Heads(factors) => factors.row::<f32>(0)[self.args.heads + head],
        }
    }

    /// Factor of the values of KV head `head`.
    fn value_factor(&self, head: usize) -> f32 {
        match self.args.kv_scales {
            KvCacheScales::Layer { value, .. } => 1.0 / value,
            KvCacheScales::Heads(factors) => {
                factors.row::<f32>(0)[self.args.heads + self.layout.kv_heads + head]
            }
        }
    }

    fn store_key(&self, key: &[T], t: usize, head: usize) {
        let Some((block, row)) = self.slot(t) else { return };
        let layout = self.layout;
        let tile = layout.key_tile(self.args.layer, block, head);
        if layout.dtype == DType::F8E4M3 {
            return self.store_fp8(tile + layout.key(row, 0), key, self.key_factor(head));
        }
        // Number of channels of one key that are contiguous in a key tile of the KV pool: 2 for bf16 pairs,
        // otherwise 1.
        let contiguous = if T::DTYPE == DType::BF16 { 2 } else { 1 };
        for (i, part) in key.chunks_exact(contiguous).enumerate() {
            let at = tile + layout.key(row, i * contiguous);
            // SAFETY: slots and layer were checked, so the tile is inside the pool; only this thread writes
            // this head.
            unsafe {
                self.pool.get().add(at).copy_from_nonoverlapping(part.as_ptr(), contiguous);
            }
        }
    }

    fn store_value(&self, t: usize, head: usize) {
        let Some((block, row)) = self.slot(t) else { return };
        let layout = self.layout;
        let tile = layout.value_tile(self.args.layer, block, head);
        let x = self.head(t, self.args.heads + layout.kv_heads + head);
        if layout.dtype == DType::F8E4M3 {
            return self.store_fp8(tile + layout.value(row, 0), x, self.value_factor(head));
        }
        let (start, dim) = (tile + layout.value(row - row % 2, 0), layout.head_dim);
        // SAFETY: slots and layer were checked, and only this thread writes this head; a pair of rows, `2
        // dim` elements, is in one tile.
        let rows = unsafe { std::slice::from_raw_parts_mut(self.pool.get().add(start), 2 * dim) };
        dispatch(self.isa, ValueRowStore { rows, x, odd: row % 2 == 1 });
    }

    /// Stores one row of an fp8 tile; each element is multiplied by `factor`.
    fn store_fp8(&self, start: usize, x: &[T], factor: f32) {
        // SAFETY: slots and layer were checked, and only this thread writes this head; elements are bytes,
        // and a row is in one tile.
        let row = unsafe {
            std::slice::from_raw_parts_mut(self.pool.get().cast::<u8>().add(start), x.len())
        };
        for (to, x) in row.iter_mut().zip(x) {
            *to = Fp8E4m3::from_f32(x.load() * factor).to_bits();
        }
    }

    /// Returns the KV block of token `t` and the row in it; `None` for slot −1.
    fn slot(&self, t: usize) -> Option<(usize, usize)> {
        let slot = usize::try_from(self.args.slots.row::<i64>(0)[t]).ok()?;
        Some((slot / self.layout.block_tokens, slot % self.layout.block_tokens))
    }
}

fn check_indices(layout: &KvLayout, args: &QkNormRopeArgs<'_>) -> Result<(), DeviceError> {
    let index = |what, index: i64, limit: usize| {
        if index < limit as i64 {
            return Ok(());
        }
        Err(DeviceError::Index { kernel: KERNEL, what, index, limit })
    };
    for &p in args.positions.row::<i32>(0) {
        index("position", i64::from(p as u32), args.rope.cos.rows())?;
    }
    for &slot in args.slots.row::<i64>(0) {
        index("slot", slot, layout.slots())?;
    }
    Ok(())
}
