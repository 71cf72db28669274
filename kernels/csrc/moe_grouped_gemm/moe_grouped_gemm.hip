// moe_grouped_gemm: one GEMM of an expert MLP if experts have many tokens each: a grouped GEMM on tensor
// cores (matrix cores), one segment of at most TILE_M rows per block. CPU reference: `ExpertMlp`.
//
// A choice is a (token, expert) pair; a position is an index in the list of choices sorted by expert, `order`
// (moe/segment.h). A segment is a range of positions of one expert.
//   -DGATED=1  gate and up: y half_t [positions, I] = gated(gate, up) of x[token of position], W [experts][2
//              I][K]; I is the intermediate size
//   -DGATED=0  down: y f32 [choices, N], row `choice` is W x[position of the choice], W [experts][N][K]
//   -DBIASED=1 adds biases (moe/bias.h)
//   -DWEIGHTS_MXFP4=1  W is MXFP4 (dev/mxfp4.h), decoded in registers; K is a multiple of 32
//   -DTILE_M=64|128
// Grid: (N / 128, max_segments). Block and dynamic shared memory: as gemm. K is a multiple of 8.
// Rounding: as moe_gemm_small_m. Roofline: 2 N K operations per choice.
#include "dev.h"
#include "moe/bias.h"
#include "gemm/tile.h"

KERNEL(256) moe_grouped_gemm(void* y, const half_t* x, const WeightElement* w, const u32* order, const ExpertSegment* segments,
                             u32 n, u32 k, u32 x_stride, u32 y_stride, u32 top_k BIAS_PARAM) {
    DYN_SHARED(half_t, stages);
    grid_wait();
    const ExpertSegment s = segments[bid_y()];
    if (s.rows == 0) return;
    const u32* choices = order + s.first;
    const u32 first = bid_x() * OUTPUTS, outputs = GATED ? n / 2 : n;
    const auto x_row = [&](u32 r) -> const half_t* {
        if (r >= s.rows) return nullptr;
        return x + (u64)(GATED ? choices[r] / top_k : s.first + r) * x_stride;
    };
    const TileAccumulators t = tile_product(stages, x_row, w + s.expert * matrix_elements(n, k), first, n, k);
    each_output(t, [&](u32 r, u32 c, float value, float up) {
        const u32 out = first + c;
        if (r >= s.rows || out >= outputs) return;
        value = ADD_BIAS(value, s.expert, out);
        if (GATED) ((half_t*)y)[(u64)(s.first + r) * y_stride + out] = to_half(gated(value, ADD_BIAS(up, s.expert, n / 2 + out)));
        else ((float*)y)[(u64)choices[r] * y_stride + out] = value;
    });
}
EXPORT(moe_grouped_gemm)
