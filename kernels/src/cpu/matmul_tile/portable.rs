//! Tile kernels without SIMD intrinsics, for any architecture. They are the reference for the SIMD
//! implementations.

use device::{FloatElement, bf16, f16};

use super::{HALF, OperandSegment, TILE_COLUMNS, TILE_ROWS, TileKernel, TileOperands, by_rows};

pub(super) const F32_KERNEL: [TileKernel; TILE_ROWS] = by_rows!(f32_step, f32);
pub(super) const F16_KERNEL: [TileKernel; TILE_ROWS] = by_rows!(f32_step, f16);
pub(super) const BF16_KERNEL: [TileKernel; TILE_ROWS] = by_rows!(bf16_pairs);

/// Computes the product of f32 `a` and f32 or f16 `b`.
unsafe fn f32_step<const M: usize, T: FloatElement>(o: &TileOperands<'_>) {
    for r in 0..M {
        // SAFETY: the caller guarantees the extents of all operands.
        unsafe {
            let mut sums = begin(o, r);
            let mut a = o.a.add(r * o.a_stride).cast::<f32>();
            for (segment, step) in steps(o) {
                let x = *a;
                a = a.add(1);
                for (half, sums) in segment.start.iter().zip(sums.as_chunks_mut::<HALF>().0) {
                    let w = &*half.add(step * o.b_stride).cast::<[T; HALF]>();
                    for (s, w) in sums.iter_mut().zip(w) {
                        *s += x * w.load();
                    }
                }
            }
            end(o, r, &sums);
        }
    }
}

/// Computes the product of bf16 operands in pairs, converted to f32.
unsafe fn bf16_pairs<const M: usize>(o: &TileOperands<'_>) {
    for r in 0..M {
        // SAFETY: the caller guarantees the extents of all operands.
        unsafe {
            let mut sums = begin(o, r);
            let mut a = o.a.add(r * o.a_stride).cast::<[bf16; 2]>();
            for (segment, step) in steps(o) {
                let [even, odd] = (*a).map(FloatElement::load);
                a = a.add(1);
                for (half, sums) in segment.start.iter().zip(sums.as_chunks_mut::<HALF>().0) {
                    let w = &*half.add(step * o.b_stride).cast::<[[bf16; 2]; HALF]>();
                    for (s, w) in sums.iter_mut().zip(w) {
                        *s += even * w[0].load();
                        *s += odd * w[1].load();
                    }
                }
            }
            end(o, r, &sums);
        }
    }
}

/// Iterates over every step of every segment of `b`.
fn steps<'a>(o: &TileOperands<'a>) -> impl Iterator<Item = (&'a OperandSegment, usize)> {
    o.b.iter().flat_map(|segment| (0..segment.steps).map(move |step| (segment, step)))
}

unsafe fn begin(o: &TileOperands<'_>, r: usize) -> [f32; TILE_COLUMNS] {
    if o.accumulate {
        // SAFETY: the caller guarantees the extent of `c`.
        unsafe { *o.c.add(r * o.c_stride).cast() }
    } else {
        [0.0; TILE_COLUMNS]
    }
}

unsafe fn end(o: &TileOperands<'_>, r: usize, sums: &[f32; TILE_COLUMNS]) {
    // SAFETY: the caller guarantees the extent of `c`.
    unsafe { *o.c.add(r * o.c_stride).cast() = *sums }
}
