// skinny: y [M, N] = x [M, K] W [N, K]^T for M <= 16, where reading W once is all the time there is.
// CPU twin: `linear`, preceded by `rms_norm` (NORM) and followed by `silu_mul` (GATED) or `add` (RESIDUAL).
//
// See strips.h for how weights stream, and for the order of a sum: a row gives the same bits whatever M is and
// wherever it lies.
//
// Rounding: x after the norm, x / rms and its product with the weight, each once to bf16; the sum once to the type of
// y. GATED rounds gate and up to bf16 and then their product; RESIDUAL rounds the sum to bf16, adds, rounds: what the
// separate kernels do.
//
//   -DOUT_F32=1     y is float
//   -DNORM=1        x is normalised by its root mean square and multiplied by norm [K] first
//   -DGATED=1       N = 2 I, y [M, I] = silu(first half) * second half
//   -DRESIDUAL=1    y += instead of y =
//   -DTILES=1..8    strips per block
// Block: a multiple of WAVE, at most 256. Grid: x = blocks over N. K a multiple of 8, rows of x and W on 16 bytes.
// Dynamic shared memory: as strips.h says.
//
// Roofline: N K 2 bytes over memory bandwidth; see KERNELS.md for measured numbers.
#include "dev.h"
#include "skinny/strips.h"

#if OUT_F32
typedef float OUT;
#else
typedef bf16 OUT;
#endif

#if NORM
// One wave per row, whatever M is: the sum of squares has one order.
DEV void stage_normed(bf16* xs, const bf16* x, const bf16* norm, u32 m, u32 k, u32 stride, float eps) {
    const u32 padded = x_stride(k) - 32;
    for (u32 row = wave(); row < m; row += bdim() / WAVE) {
        const bf16* from = x + (u64)row * stride;
        bf16* to = xs + row * x_stride(k);
        float squares = 0.f;
        for (u32 at = lane() * 8; at < k; at += WAVE * 8) {
            const f32x8 v = load8(from + at);
            for (u32 i = 0; i < 8; ++i) squares = fma_(v.v[i], v.v[i], squares);
        }
        const float scale = rsqrt_(wave_sum(squares) / (float)k + eps);
        for (u32 at = lane() * 8; at < padded; at += WAVE * 8) {
            if (at >= k) {
                *(bf16x8*)(to + at) = zero8();
                continue;
            }
            f32x8 v = load8(from + at);
            const f32x8 w = load8(norm + at);
            for (u32 i = 0; i < 8; ++i) v.v[i] = w.v[i] * f32(to_bf16(v.v[i] * scale));
            store8(to + at, v);
        }
    }
}
#endif

KERNEL(256) skinny(OUT* y, const bf16* x, const bf16* w, const float* bias, const bf16* norm, u32 m, u32 n, u32 k,
                   u32 y_stride, u32 x_stride_, float eps) {
    const Weights weights{w, bid_x() * TILES * WIDTH, n, k};
    const float* sums = strip_sums(weights, m, [&](bf16* xs) {
#if NORM
        stage_normed(xs, x, norm, m, k, x_stride_, eps);
#else
        stage_rows(xs, [&](u32 row) { return x + (u64)row * x_stride_; }, m, k);
#endif
    });
    each_sum(weights, sums, m, [&](u32 row, u32 out, float s, float up) {
        if (bias) s += bias[out];
        if (GATED) s = gated(s, up + (bias ? bias[n / 2 + out] : 0.f));
        OUT* dst = y + (u64)row * y_stride + out;
#if RESIDUAL
        s = f32(*dst) + f32(to<OUT>(s));
#endif
        *dst = to<OUT>(s);
    });
}
EXPORT(skinny)
