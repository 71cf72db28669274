// fp8_gemm_small_m: y [M, N] = x [M, K] W [N, K]^T for M <= 16 and W in fp8 with scales; its time is bound by
// reading W once.
// CPU reference: `Linear` with dequantised W, preceded by `RmsNorm` (NORM), followed by `GatedActivation` (GATED) or
// `TensorAdd` (RESIDUAL). x is not quantised (W8A16): products use its half_t values.
//
// With -DSTREAM=1 (NVIDIA from sm_90 on, warps of 32 lanes) it uses stream.h, else strips.h. x is half_t;
// with STREAM and PREPARED it is f16 [M, K] with `factors` [M] (scale_rows_to_f16 of fp8_quantize). The
// result of a row is bit-identical for any M and any row index.
//
// Rounding, as in gemm_small_m: x / rms, and its product with the norm weight, each once to half_t; sums in
// f32, rounded once to the type of y; GATED and RESIDUAL round intermediate values as the separate kernels
// store them.
//
//   ahead     with STREAM: weights of the next GEMM, a part of which is prefetched into L2 (stream.h)
//   scales    f32, one per `unit` outputs and 128 k, with row stride scale_stride; with CHANNELS one per
//             output: [N]
//   -DOUT_F32=1 -DNORM=1 -DGATED=1 -DRESIDUAL=1   as gemm_small_m     -DCHANNELS=1   per-output scales
//   -DTILES=1..8   strips per pass. With STREAM only: -DSLAB=512|1024|2048 (k per stage)  -DX_SLABS=1 (x is
//                  staged with each slab)  -DPREPARED=1  -DMORE_ROWS=1 (M > 8)
// Block: 12 warps with STREAM, else 256 threads. Grid: with STREAM at most one block per SM and at most one
// per strip; else one block per TILES strips. K is a multiple of 64; scale units are multiples of 8 outputs,
// and with GATED divide both halves.
// Dynamic shared memory: see share.h or strips.h.
//
// Roofline: N K bytes over memory bandwidth. Measured: tests/bench/results/h200/kernels.md.
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
#ifndef CHANNELS
#  define CHANNELS 0
#endif
#ifndef X_SLABS
#  define X_SLABS 0
#endif
#ifndef MORE_ROWS
#  define MORE_ROWS 0
#endif
#ifndef PREPARED
#  define PREPARED 0
#endif
#if STREAM
#  include "dev/wgmma.h"
#  include "fp8_gemm_small_m/stream.h"
#  if !PREPARED
#    include "fp8_gemm_small_m/rows.h"
#  endif
#else
#  include "fp8_gemm_small_m/strips.h"
#endif

#if OUT_F32
typedef float OUT;
#else
typedef half_t OUT;
#endif

// Parameters of the epilogue: scales and bias. On gfx942 sums are doubled, because W keeps its OCP fp8 bits,
// which in FNUZ represent half of the value.
struct EpilogueParams {
    const float *scales, *bias;
    u32 outputs;
};
DEV float apply_epilogue(const EpilogueParams& f, u32 out, float sum, float up) {
    const float fnuz_factor = FP8_FNUZ ? 2.f : 1.f;
    sum *= CHANNELS ? fnuz_factor * f.scales[out] : fnuz_factor;
    if (f.bias) sum += f.bias[out];
    if (!GATED) return sum;
    up *= CHANNELS ? fnuz_factor * f.scales[f.outputs + out] : fnuz_factor;
    return gated(sum, up + (f.bias ? f.bias[f.outputs + out] : 0.f));
}

#if STREAM
KERNEL_ALONE(CONSUMER_THREADS + PRODUCER_WARPS * WARP_SIZE)
fp8_gemm_small_m(OUT* y, const half_t* x, const float* factors, const fp8* w, const float* scales, const float* bias, const half_t* norm,
                 u32 m, u32 n, u32 k, u32 y_stride, u32 x_stride, u32 unit, u32 scale_stride, float eps, const fp8* ahead,
                 u32 ahead_outputs, u32 ahead_halves, u32 ahead_k, u32 ahead_strips, u32 ahead_blocks, u32 ahead_bytes) {
    DYN_SHARED(u8, shared);
    const SharedMemoryLayout s = shared_layout(shared, m, n, k);
    if (tid() == 0) {
#pragma unroll 1
        for (u32 i = 0; i < s.stages; ++i) {
            barrier_init(s.full + i, PRODUCER_WARPS);
            barrier_init(s.empty + i, COMPUTE_WARPS);
        }
        barrier_init(s.rows, 1);
        barriers_ready();
    }
    sync();
    const BlockWork work = even_share(w, n, k, m);
    if (warp_id() >= COMPUTE_WARPS) {
        const PrefetchWork next{ahead, ahead_outputs, ahead_halves, ahead_k, ahead_strips, ahead_blocks, ahead_bytes};
        return copy_all(work, s, x, next);
    }

    grid_launch_dependents();
    if (!CHANNELS) keep_scales(work, s, scales, unit, scale_stride);
#if NORM
    const LaneRowPieces weights = load_pieces(norm, k);
#endif
    grid_wait();
#if PREPARED
    if (tid() < m) s.factors[tid()] = factors[tid()];
    named_barrier_sync<1>(CONSUMER_THREADS);
    if (!X_SLABS) barrier_wait(s.rows, 0);
#elif NORM
    stage_x_rows(work, s, x, weights, x_stride, eps);
#else
    stage_x_rows(work, s, x, x_stride);
#endif
    const EpilogueParams epilogue{scales, bias, n / HALVES};
    const auto old = [&](u32 row, u32 out, bool really) {
        return RESIDUAL && really ? y[(u64)row * y_stride + out] : OUT{};
    };
    multiply_all(work, s, old, [&](u32 row, u32 out, float sum, float up, OUT before) {
        sum = apply_epilogue(epilogue, out, sum, up);
        if (RESIDUAL) sum = f32(before) + f32(to<OUT>(sum));
        y[(u64)row * y_stride + out] = to<OUT>(sum);
    });
}
#else
KERNEL(256) fp8_gemm_small_m(OUT* y, const half_t* x, const float* factors, const fp8* w, const float* scales, const float* bias,
                             const half_t* norm, u32 m, u32 n, u32 k, u32 y_stride, u32 x_stride, u32 unit, u32 scale_stride,
                             float eps) {
    const ScaledFp8Weights weights{w, scales, bid_x() * TILES * WIDTH, n, k, unit, scale_stride};
    const auto row = [&](u32 r) { return x + (u64)r * x_stride; };
    const float* sums = strip_sums(weights, m, [&](half_t* xs) { stage_rows(xs, row, norm, m, k, eps); });
    const EpilogueParams epilogue{scales, bias, n / HALVES};
    each_sum(weights, sums, m, [&](u32 row, u32 out, float sum, float up) {
        sum = apply_epilogue(epilogue, out, sum, up);
        OUT* dst = y + (u64)row * y_stride + out;
        if (RESIDUAL) sum = f32(*dst) + f32(to<OUT>(sum));
        *dst = to<OUT>(sum);
    });
}
#endif
EXPORT(fp8_gemm_small_m)
