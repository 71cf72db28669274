// moe_gemm_small_m: one GEMM of an expert MLP if experts have few tokens each: weights of active experts are
// streamed once per segment of at most 16 rows. CPU reference: `ExpertMlp`.
//
// A choice is a (token, expert) pair; a position is an index in the list of choices sorted by expert, `order`
// (moe/segment.h).
//   -DGATED=1  gate and up: y half_t [positions, I] = gated(gate, up) of x[token of position], W [experts][2
//              I][K]; I is the intermediate size
//   -DGATED=0  down: y f32 [choices, N], row `choice` is W x[position of the choice], W [experts][N][K]
//   -DBIASED=1 adds biases (moe/bias.h)
//   -DWEIGHTS_MXFP4=1  W is MXFP4 (dev/mxfp4.h), decoded in registers; K is a multiple of 32
//   -DTILES    strips per block; see gemm_small_m/strips.h, also for the order of additions
// Grid: (blocks over outputs, max_segments). Block and dynamic shared memory: as gemm_small_m, with M = 16.
// K is a multiple of 8. Rounding: GATED as gemm_small_m; the down projection is not rounded from f32.
//
// Roofline: N K 2 bytes per active expert over memory bandwidth; MXFP4: N K 17 / 32.
#include "dev.h"
#include "moe/bias.h"
#include "gemm_small_m/strips.h"

KERNEL(256) moe_gemm_small_m(void* y, const half_t* x, const WeightElement* w, const u32* order, const ExpertSegment* segments,
                             u32 n, u32 k, u32 x_stride_, u32 y_stride, u32 top_k BIAS_PARAM) {
    grid_wait();
    const ExpertSegment s = segments[bid_y()];
    if (s.rows == 0) return;
    const u32* choices = order + s.first;
    const StripWeights weights{w + s.expert * matrix_elements(n, k), bid_x() * TILES * WIDTH, n, k};
#if WARP_SIZE == 64
    // A lane has the index of one row of x, because a wait for another load would wait for the rows in flight.
    const u32 own_row = GATED && lane() < s.rows ? choices[lane()] / top_k : 0;
    const auto x_row = [&](u32 r) { return x + (u64)(GATED ? shfl(own_row, r) : s.first + r) * x_stride_; };
    const float* sums = strip_sums(weights, s.rows, RowStage<decltype(x_row)>{x_row, s.rows, k});
#else
    const float* sums = strip_sums(weights, s.rows, [&](half_t* xs) {
        const auto row = [&](u32 r) { return x + (u64)(GATED ? choices[r] / top_k : s.first + r) * x_stride_; };
        stage_rows(xs, row, s.rows, k);
    });
#endif
    each_sum(weights, sums, s.rows, [&](u32 row, u32 out, float sum, float up) {
        sum = ADD_BIAS(sum, s.expert, out);
        if (GATED) ((half_t*)y)[(u64)(s.first + row) * y_stride + out] = to_half(gated(sum, ADD_BIAS(up, s.expert, n / 2 + out)));
        else ((float*)y)[(u64)choices[row] * y_stride + out] = sum;
    });
}
EXPORT(moe_gemm_small_m)
