//! Exponential and activation functions that the compiler can vectorise in loops, and sums in a fixed order.

/// `e^x` for f32, relative error below 2e-7; 0 below −87.3, infinity above 88.7; NaN stays NaN.
///
/// Splits `x = n ln 2 + r`, `|r| ≤ ln 2 / 2`, and evaluates a polynomial of degree 6 (Cephes `expf`).
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 · 2^23 rounds to an integer, which is then in the low bits of the sum; subtracting 1.5 ·
    // 2^23 gives the integer as f32.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.4, 88.8);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let y = p * r * r + r + 1.0;
    // Scale by 2^n as two factors, so that n = 128 and n = −127 need no special case.
    let n = (shifted.to_bits() as i32) - (ROUND.to_bits() as i32);
    let half = n >> 1;
    let scaled = y * power_of_two(half) * power_of_two(n - half);
    let bounded = if x < -87.3 { 0.0 } else { scaled };
    let bounded = if x > 88.73 { f32::INFINITY } else { bounded };
    if x.is_nan() { x } else { bounded }
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) << 23) as u32)
}

/// `x · sigmoid(x)`.
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// GELU in its tanh approximation, `x / 2 · (1 + tanh z) = x · sigmoid(2 z)` with `z = √(2/π) (x + 0.044715
/// x³)`.
#[inline(always)]
pub(super) fn gelu_tanh(x: f32) -> f32 {
    const SQRT_8_OVER_PI: f32 = 1.595_769_2;
    x / (1.0 + exp(-SQRT_8_OVER_PI * x * (1.0 + 0.044_715 * x * x)))
}

/// Returns `x` bounded to `[low, high]`. NaN stays NaN.
#[inline(always)]
pub(super) fn bounded(x: f32, low: f32, high: f32) -> f32 {
    let x = if x > high { high } else { x };
    if x < low { low } else { x }
}

/// Number of SIMD lanes of running sums and maxima.
const LANES: usize = 16;
/// Number of elements to which `sum_by` applies `f` at a time: loops over blocks of constant size vectorise
/// for every element type.
const BLOCK: usize = 8 * LANES;

/// Returns the sum of `f(x[i])` in a fixed order: 16 running sums, one for each `i mod 16`, which are then
/// added as a tree.
#[inline(always)]
pub(super) fn sum_by<T: Copy>(x: &[T], f: impl Fn(T) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (whole, rest) = x.as_chunks::<BLOCK>();
    for block in whole {
        let mut mapped = [0.0; BLOCK];
        for (m, x) in mapped.iter_mut().zip(block) {
            *m = f(*x);
        }
        add_lanes(&mut lanes, &mapped);
    }
    let mut mapped = [0.0; BLOCK];
    for (m, x) in mapped.iter_mut().zip(rest) {
        *m = f(*x);
    }
    add_lanes(&mut lanes, &mapped[..rest.len().next_multiple_of(LANES)]);
    fold(lanes, |a, b| a + b)
}

/// Returns the sum of 64 f32 values, added in the same order as in [`sum_by`].
#[inline(always)]
pub(super) fn sum(x: &[f32; 64]) -> f32 {
    let mut lanes = [0.0; LANES];
    add_lanes(&mut lanes, x);
    fold(lanes, |a, b| a + b)
}

/// Returns the largest of 64 f32 values; NaNs are ignored.
#[inline(always)]
pub(super) fn largest(x: &[f32; 64]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in x.as_chunks::<LANES>().0 {
        for i in 0..LANES {
            lanes[i] = larger(chunk[i], lanes[i]);
        }
    }
    fold(lanes, larger)
}

/// Returns `a` if `a > b`, otherwise `b` (also if `a` is NaN). Compiles to a single max instruction.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline(always)]
fn add_lanes(lanes: &mut [f32; LANES], x: &[f32]) {
    for chunk in x.as_chunks::<LANES>().0 {
        for i in 0..LANES {
            lanes[i] += chunk[i];
        }
    }
}

/// Reduces the lanes to one value: `f` combines the upper half of the lanes with the lower half until one
/// lane is left. Arrays are passed by value, so that they stay in registers.
#[inline(always)]
fn fold(x: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let x: [f32; 8] = std::array::from_fn(|i| f(x[i], x[i + 8]));
    let x: [f32; 4] = std::array::from_fn(|i| f(x[i], x[i + 4]));
    f(f(x[0], x[2]), f(x[1], x[3]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        let mut worst = 0.0f64;
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - exact).abs() / exact);
        }
        assert!(worst < 2e-7, "relative error {worst:e}");
    }

    #[test]
    fn exp_at_the_range_limits() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-100.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(100.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn sums_include_every_element() {
        for n in 0..70 {
            let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
            assert_eq!(sum_by(&x, |x| x), (n * (n - 1).max(0) / 2) as f32);
        }
    }
}
