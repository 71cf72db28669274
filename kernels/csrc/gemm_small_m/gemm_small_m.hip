// gemm_small_m: y [M, N] = x [M, K] W [N, K]^T for M <= 16 (GEMV and small-M GEMM); its time is bound by
// reading W once. CPU reference: `Linear`, preceded by `RmsNorm` (NORM) and followed by `GatedActivation` (GATED) or
// `TensorAdd` (RESIDUAL).
//
// strips.h, or with STREAM (NVIDIA from sm_90 on) stream.h, describes how weights are loaded and the order of
// additions. The result of a row is bit-identical for any M and any row index.
//
// Rounding: with NORM, x / rms is rounded to half_t, and so is its product with the norm weight. The sum over
// K is rounded once to the type of y. With GATED, gate and up are rounded to half_t, then gated(gate, up).
// With RESIDUAL, the sum is rounded, y is added, and the result is rounded again, as by the separate kernels.
//
//   -DOUT_F32=1     y is float
//   -DNORM=1        x is first normalised by RMSNorm with weights norm [K]
//   -DGATED=1       y [M, N / 2] = gated(gate, up), where the first half of W's rows gives gate and the
//                   second half up
//   -DRESIDUAL=1    the product is added to y instead of overwriting y
//   -DTILES=1..8    strips per block
//   -DSTREAM=1      weights are streamed by bulk copies
// Block: a multiple of WARP_SIZE, at most 256. Grid: one block per TILES strips; with STREAM see stream.h. K
// is a multiple of 8, rows of x and W are aligned to 16 bytes.
// Dynamic shared memory: see strips.h or stream.h.
//
// Roofline: N K 2 bytes over memory bandwidth. Measured: tests/bench/results/h200/kernels.md.
#include "dev.h"
#ifndef NORM
#  define NORM 0
#endif
#ifndef GATED
#  define GATED 0
#endif
#ifndef RESIDUAL
#  define RESIDUAL 0
#endif
#if STREAM
#  include "gemm_small_m/stream.h"
#else
#  include "gemm_small_m/strips.h"
#endif

#if OUT_F32
typedef float OUT;
#else
typedef half_t OUT;
#endif

#if NORM && !STREAM
#  include "dev/normed_rows.h"
// Normalises the rows of x and stores them in shared memory.
DEV void stage_normed(half_t* xs, const half_t* x, const half_t* norm, u32 m, u32 k, u32 stride, float eps) {
    const u32 padded = x_stride(k) - X_PADDING;
    for (u32 row = warp_id(); row < m; row += bdim() / WARP_SIZE) {
        const half_t* from = x + (u64)row * stride;
        copy_normed_row(xs + row * x_stride(k), from, norm, k, padded, row_inverse_rms(from, k, eps));
    }
}
#endif

#if STREAM
KERNEL(CONSUMER_THREADS + WARP_SIZE) gemm_small_m(OUT* y, const half_t* x, const half_t* w, const float* bias, const half_t* norm, u32 m,
                                             u32 n, u32 k, u32 y_stride, u32 x_stride, float eps) {
    DYN_SHARED(u8, shared);
    const SharedMemoryLayout s = shared_layout(shared, m, k);
    if (tid() == 0) {
#pragma unroll 1
        for (u32 i = 0; i < s.stages; ++i) {
            barrier_init(s.full + i, 1);
            barrier_init(s.empty + i, COMPUTE_WARPS);
        }
        barriers_ready();
    }
    sync();
    const BlockWork work = even_share(w, n, k, m);
    if (warp_id() == COMPUTE_WARPS) return copy_all(work, s, x, x_stride);

    grid_launch_dependents();
#if NORM
#pragma unroll 1
    for (u32 p = tid(); p < k / 8; p += CONSUMER_THREADS) *(half_x8*)(s.norm + p * 8) = load_const((const half_x8*)norm + p);
#endif
    grid_wait();
#if NORM
    stage_normed_rows(work, s, x, x_stride, eps);
#elif !X_SLABS
    stage_x_rows(work, s, x, x_stride);
#endif
    const auto old = [&](u32 row, u32 out, bool really) {
        return RESIDUAL && really ? y[(u64)row * y_stride + out] : OUT{};
    };
    multiply_all(work, s, old, [&](u32 row, u32 out, float sum, float up, OUT before) {
        if (bias) sum += bias[out];
        if (GATED) sum = gated(sum, up + (bias ? bias[n / 2 + out] : 0.f));
        if (RESIDUAL) sum = f32(before) + f32(to<OUT>(sum));
        y[(u64)row * y_stride + out] = to<OUT>(sum);
    });
}
#else
KERNEL(256) gemm_small_m(OUT* y, const half_t* x, const half_t* w, const float* bias, const half_t* norm, u32 m, u32 n, u32 k,
                         u32 y_stride, u32 x_stride_, float eps) {
    const StripWeights weights{w, bid_x() * TILES * WIDTH, n, k};
#if WARP_SIZE == 64 && NORM
    const auto normalise = [&](half_t* xs) { stage_normed(xs, x, norm, m, k, x_stride_, eps); };
    const float* sums = strip_sums(weights, m, WholeStage<decltype(normalise)>{normalise});
#elif WARP_SIZE == 64
    const auto x_row = [&](u32 row) { return x + (u64)row * x_stride_; };
    const float* sums = strip_sums(weights, m, RowStage<decltype(x_row)>{x_row, m, k});
#else
    const float* sums = strip_sums(weights, m, [&](half_t* xs) {
#  if NORM
        stage_normed(xs, x, norm, m, k, x_stride_, eps);
#  else
        stage_rows(xs, [&](u32 row) { return x + (u64)row * x_stride_; }, m, k);
#  endif
    });
#endif
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
#endif
EXPORT(gemm_small_m)
