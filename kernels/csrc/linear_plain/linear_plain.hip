// linear_plain: y [M, N] = x [M, K] W [N, K]^T + bias in f32 arithmetic: f32 models, MoE routers (half_t
// rows, f32 weights), half_t weights of at most 4 rows, and shapes that do not allow 16-byte loads. There are two kernels with different
// summation orders; the host chooses by N and K only. CPU reference: `Linear`.
//
//   -DX_F32=0|1 -DW_F32=0|1 -DOUT_F32=0|1
//
// linear_row: one block per row of W and up to ROWS rows of x; the block's threads split K, eight columns each if half_t
// operands allow 16-byte loads. Grid: (N, M / ROWS). Block: 256.
// linear_tile: 64 x 64 tiles, 4 x 4 per thread, K through shared memory. Grid: (N / 64, M / 64). Block: 256.
// Order of additions: linear_row adds per lane, then as block_sum does; linear_tile adds over ascending k.
// Rounding: the sum plus bias, once.
#include "dev.h"
#include "dev/strip.h"

#if X_F32
typedef float X;
#else
typedef half_t X;
#endif
#if W_F32
typedef float W;
#else
typedef half_t W;
#endif
#if OUT_F32
typedef float OUT;
#else
typedef half_t OUT;
#endif

enum : u32 { ROWS = 4, SIDE = 64, STEP_K = 16 };

KERNEL(256) linear_row(OUT* y, const X* x, const W* w, const float* bias, u32 m, u32 n, u32 k, u32 y_stride,
                       u32 x_stride) {
    SHARED(float, parts, 32 * ROWS);
    const u32 out = bid_x(), first = bid_y() * ROWS, warps = bdim() / WARP_SIZE;
    const W* row = w + (u64)out * k;
    grid_wait();
    float sums[ROWS];
    UNROLL for (u32 r = 0; r < ROWS; ++r) sums[r] = 0.f;
#if !X_F32 && !W_F32
    const bool is_aligned = ((k | x_stride) & 7) == 0 && (((u64)x | (u64)w) & 15) == 0;
    for (u32 i = tid() * 8; is_aligned && i < k; i += bdim() * 8) {
        const f32x8 weight = load8(row + i);
        f32x8 inputs[ROWS];  // those of absent rows are not used
        UNROLL for (u32 r = 0; r < ROWS; ++r) inputs[r] = load8(x + (u64)(first + r < m ? first + r : first) * x_stride + i);
        UNROLL for (u32 r = 0; r < ROWS; ++r)
            UNROLL for (u32 j = 0; j < 8; ++j) sums[r] = fma_(inputs[r].v[j], weight.v[j], sums[r]);
    }
    const u32 scalar_from = is_aligned ? k : tid();
#else
    const u32 scalar_from = tid();
#endif
    for (u32 i = scalar_from; i < k; i += bdim()) {
        const float weight = f32(row[i]);
        UNROLL for (u32 r = 0; r < ROWS; ++r)
            if (first + r < m) sums[r] = fma_(f32(x[(u64)(first + r) * x_stride + i]), weight, sums[r]);
    }
    UNROLL for (u32 r = 0; r < ROWS; ++r) {
        const float sum = warp_sum(sums[r]);
        if (lane() == 0) parts[warp_id() * ROWS + r] = sum;
    }
    sync();
    if (tid() >= ROWS || first + tid() >= m) return;
    float sum = parts[tid()];
    for (u32 i = 1; i < warps; ++i) sum += parts[i * ROWS + tid()];
    if (bias) sum += bias[out];
    y[(u64)(first + tid()) * y_stride + out] = to<OUT>(sum);
    (void)n;
}
EXPORT(linear_row)

KERNEL(256) linear_tile(OUT* y, const X* x, const W* w, const float* bias, u32 m, u32 n, u32 k, u32 y_stride,
                        u32 x_stride) {
    SHARED(float, xs, STEP_K * (SIDE + 1));
    SHARED(float, ws, STEP_K * (SIDE + 1));
    grid_wait();
    const u32 row = bid_y() * SIDE, column = bid_x() * SIDE, ty = tid() / 16, tx = tid() % 16;
    float c[4][4];
    UNROLL for (u32 i = 0; i < 4; ++i)
        UNROLL for (u32 j = 0; j < 4; ++j) c[i][j] = 0.f;
    for (u32 at = 0; at < k; at += STEP_K) {
        for (u32 i = tid(); i < SIDE * STEP_K; i += 256) {
            const u32 line = i / STEP_K, here = i % STEP_K, r = row + line, o = column + line;
            const bool inside = at + here < k;
            xs[here * (SIDE + 1) + line] = inside && r < m ? f32(x[(u64)r * x_stride + at + here]) : 0.f;
            ws[here * (SIDE + 1) + line] = inside && o < n ? f32(w[(u64)o * k + at + here]) : 0.f;
        }
        sync();
        for (u32 s = 0; s < STEP_K; ++s) {
            float a[4], b[4];
            UNROLL for (u32 i = 0; i < 4; ++i) {
                a[i] = xs[s * (SIDE + 1) + ty + i * 16];
                b[i] = ws[s * (SIDE + 1) + tx + i * 16];
            }
            UNROLL for (u32 i = 0; i < 4; ++i)
                UNROLL for (u32 j = 0; j < 4; ++j) c[i][j] = fma_(a[i], b[j], c[i][j]);
        }
        sync();
    }
    UNROLL for (u32 i = 0; i < 4; ++i)
        UNROLL for (u32 j = 0; j < 4; ++j) {
            const u32 r = row + ty + i * 16, o = column + tx + j * 16;
            if (r < m && o < n) y[(u64)r * y_stride + o] = to<OUT>(c[i][j] + (bias ? bias[o] : 0.f));
        }
}
EXPORT(linear_tile)
