// moe_fp8_gemm: one GEMM of an expert MLP with fp8 weights and block scales. Weights of active experts are
// read once per segment. CPU reference: `ExpertMlp` with dequantised weights.
//
//   moe_fp8_gemm_small_m  segments of at most 16 rows; x is half_t, not quantised. See
//                         fp8_gemm_small_m/strips.h
//   moe_fp8_grouped_gemm  segments of at most 64 rows; x is fp8 with x_scales from fp8_quantize_rows. See
//                         fp8_gemm/tile.h
//
// A choice is a (token, expert) pair; a position is an index in the list of choices sorted by expert, `order`
// (moe/segment.h).
//   -DGATED=1  gate and up: y half_t [positions, I] = gated(gate, up) of x[token of position], W [experts][2
//              I][K]; I is the intermediate size
//   -DGATED=0  down: y f32 [choices, N], row `choice` is W x[position of the choice], W [experts][N][K]
//   scales    f32 scales of W, one per `unit` outputs and 128 k, with row stride scale_stride and N / unit
//             rows per expert
//   x_scales  f32 scales of x, one per row and 128 k: [K / 128, x_scale_stride]; rows are tokens (GATED) or
//             positions
//   -DTILES=0..8  strips per block; 0: moe_fp8_grouped_gemm
// K is a multiple of 64. `unit` is a multiple of 8 and divides N, and with GATED also I.
// Grid: (blocks over outputs, max_segments). Block: 256. Dynamic shared memory: that of
// fp8_gemm_small_m/strips.h with M = 16, or none with TILES=0.
// Rounding: as moe_gemm_small_m. Roofline: N K bytes of W per active expert, or 2 N K operations per choice.
#include "dev.h"
#include "moe/segment.h"
#define CHANNELS 0
#define NORM 0
#if TILES
#  include "fp8_gemm_small_m/strips.h"
#else
// On gfx942 the vectors of a whole step would need the registers of a third block per compute unit.
#  define SPLIT_STEP (DEV_AMD && DEV_GFX == 0x942)
#  include "fp8_gemm/tile.h"
#endif

// Scales of expert weights: f32, one per `unit` outputs and 128 k, with row stride `stride`.
struct ExpertScales { const float* scales; u32 unit, stride; };

DEV ScaledFp8Weights expert_weights(const ExpertSegment& s, const fp8* w, const ExpertScales& by, u32 first, u32 n,
                                    u32 k) {
    const float* scales = by.scales + (u64)s.expert * (n / by.unit) * by.stride;
    return ScaledFp8Weights{w + (u64)s.expert * n * k, scales, first, n, k, by.unit, by.stride};
}

// Rows of x of a segment: row r of the segment is row x_of(rows, r) of x.
struct SegmentRows {
    const u32* choices;
    u32 first, top_k;
};
DEV u32 x_of(const SegmentRows& rows, u32 r) { return GATED ? rows.choices[r] / rows.top_k : rows.first + r; }

DEV void put(void* y, const SegmentRows& rows, u32 stride, u32 r, u32 out, float sum, float up) {
    if (GATED) ((half_t*)y)[(u64)(rows.first + r) * stride + out] = to_half(gated(sum, up));
    else ((float*)y)[(u64)rows.choices[r] * stride + out] = sum;
}

#if TILES
KERNEL(256) moe_fp8_gemm_small_m(void* y, const half_t* x, const fp8* w, const u32* order,
                                 const ExpertSegment* segments, u32 n, u32 k, u32 x_stride, u32 y_stride, u32 top_k,
                                 const float* scales, u32 unit, u32 scale_stride) {
    grid_wait();
    const ExpertSegment s = segments[bid_y()];
    if (s.rows == 0) return;
    const SegmentRows rows{order + s.first, s.first, top_k};
    const ScaledFp8Weights weights = expert_weights(s, w, ExpertScales{scales, unit, scale_stride},
                                                    bid_x() * TILES * WIDTH, n, k);
    const float* sums = strip_sums(weights, s.rows, [&](half_t* xs) {
        stage_rows(xs, [&](u32 r) { return x + (u64)x_of(rows, r) * x_stride; }, nullptr, s.rows, k, 0.f);
    });
    const float fnuz_factor = FP8_FNUZ ? 2.f : 1.f;
    each_sum(weights, sums, s.rows, [&](u32 r, u32 out, float sum, float up) {
        put(y, rows, y_stride, r, out, sum * fnuz_factor, up * fnuz_factor);
    });
}
EXPORT(moe_fp8_gemm_small_m)
#else
KERNEL(256) moe_fp8_grouped_gemm(void* y, const fp8* x, const fp8* w, const u32* order, const ExpertSegment* segments,
                                 u32 n, u32 k, u32 x_stride, u32 y_stride, u32 top_k, const float* scales, u32 unit,
                                 u32 scale_stride, const float* x_scales, u32 x_scale_stride) {
    grid_wait();
    const ExpertSegment s = segments[bid_y()];
    if (s.rows == 0) return;
    const SegmentRows rows{order + s.first, s.first, top_k};
    const ScaledFp8Weights weights = expert_weights(s, w, ExpertScales{scales, unit, scale_stride}, bid_x() * OUTPUTS,
                                                    n, k);
    const auto x_row = [&](u32 r) -> const fp8* { return r < s.rows ? x + (u64)x_of(rows, r) * x_stride : nullptr; };
#if WARP_SIZE == 64
    // Choices are loaded before the loop: in it, the load of a scale would wait for that of its choice, and for all loads
    // before. Rows that do not exist are zeros and have the scale of the last row.
    u32 own[OWN];
    UNROLL for (u32 i = 0; i < OWN; ++i) {
        const u32 r = first_row() + slot_row(i);
        own[i] = x_of(rows, r < s.rows ? r : s.rows - 1) * (u32)sizeof(float);
    }
    const auto x_scale = [&](u32 i, u32, u32 block) { return scale_at(x_scales + (u64)block * x_scale_stride, own[i]); };
#else
    const auto x_scale = [&](u32, u32 r, u32 block) {
        return r < s.rows ? x_scales[(u64)block * x_scale_stride + x_of(rows, r)] : 1.f;
    };
#endif
    const TileAccumulators sums = tile_product(weights, x_row, x_scale);
    each_output(weights, sums, [&](u32 r, u32 out, float sum, float up) {
        if (r < s.rows && out < n / HALVES) put(y, rows, y_stride, r, out, sum, up);
    });
}
EXPORT(moe_fp8_grouped_gemm)
#endif
