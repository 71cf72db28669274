// gemm_small_m/rows.h - copies all rows of x to shared memory, where they stay until the block ends; with
// NORM the rows are normalised first. The consumer warps call these functions after grid_wait().
#pragma once

#if NORM
// Multiplies a pair of values of x by `scale` (1 / rms) and rounds, then multiplies by a pair of norm weights
// and rounds again.
DEV u32 normed(u32 pair, float scale, u32 weights) {
    u32 r;
    const float low = low_half(pair) * scale, high = high_half(pair) * scale;
#if DEV_NV
    asm("mul.rn." HALF_PTX "x2 %0, %1, %2;" : "=r"(r) : "r"(pack_half(low, high)), "r"(weights));
#else
    const u32 a = to_half(low_half(weights) * f32(to_half(low))).bits;
    const u32 b = to_half(high_half(weights) * f32(to_half(high))).bits;
    r = a | b << 16;
#endif
    return r;
}

// Normalises the rows of x and stores them in shared memory. A row is processed by as many warps as a block
// of rms_norm has, in the same order of additions, so that results are bit-identical to rms_norm. Each warp
// has loads of several rows in flight.
DEV void stage_normed_rows(const BlockWork& work, const SharedMemoryLayout& s, const half_t* x, u32 x_stride,
                           float eps) {
    enum : u32 { ROWS = 4, EACH = 2 };  // rows at a time; pieces per lane and row
    const u32 pieces = work.k / 8, warps = ((pieces <= 256 ? pieces : (pieces + 1) / 2) + WARP_SIZE - 1) / WARP_SIZE;
    const u32 groups = COMPUTE_WARPS / warps, line = x_line(work.k), member = warp_id() % warps, first = member * WARP_SIZE + lane();
    const u32 from = warp_id() / warps < groups ? warp_id() / warps : work.m;  // Excess warps have no rows.
#pragma unroll 1
    for (u32 row = from; row < work.m; row += ROWS * groups) {
        u32x4 v[ROWS][EACH];
        UNROLL for (u32 i = 0; i < ROWS; ++i)
            UNROLL for (u32 p = 0; p < EACH; ++p) {
                const u32 at = row + i * groups, piece = first + p * warps * WARP_SIZE;
                v[i][p] = u32x4{{0, 0, 0, 0}};
                if (at < work.m && piece < pieces) v[i][p] = *(const u32x4*)(x + (u64)at * x_stride + piece * 8);
            }
        UNROLL for (u32 i = 0; i < ROWS; ++i) {
            if (row + i * groups >= work.m) break;
            float squares = 0.f;
            UNROLL for (u32 p = 0; p < EACH; ++p) {
                UNROLL for (u32 j = 0; j < 4; ++j) {
                    squares = fma_(low_half(v[i][p].v[j]), low_half(v[i][p].v[j]), squares);
                    squares = fma_(high_half(v[i][p].v[j]), high_half(v[i][p].v[j]), squares);
                }
                if (first + p * warps * WARP_SIZE < pieces)
                    *(u32x4*)(s.x + (row + i * groups) * line + (first + p * warps * WARP_SIZE) * 16) = v[i][p];
            }
            squares = warp_sum(squares);
            if (lane() == 0) s.squares[member * MOST_ROWS + row + i * groups] = squares;
        }
    }
    named_barrier_sync<1>(CONSUMER_THREADS);
#pragma unroll 1
    for (u32 row = from; row < work.m; row += groups) {
        float parts[COMPUTE_WARPS];
        UNROLL for (u32 w = 0; w < COMPUTE_WARPS; ++w) parts[w] = w < warps ? s.squares[w * MOST_ROWS + row] : 0.f;
        float sum = parts[0];
        UNROLL for (u32 w = 1; w < COMPUTE_WARPS; ++w) sum += parts[w];
        const float scale = rsqrt_(sum / (float)work.k + eps);
        UNROLL for (u32 p = 0; p < EACH; ++p) {
            const u32 piece = first + p * warps * WARP_SIZE;
            if (piece >= pieces) break;
            u32x4* at = (u32x4*)(s.x + row * line + piece * 16);
            const u32x4 w = *(const u32x4*)(s.norm + piece * 8);
            u32x4 v = *at;
            UNROLL for (u32 i = 0; i < 4; ++i) v.v[i] = normed(v.v[i], scale, w.v[i]);
            *at = v;
        }
    }
    named_barrier_sync<1>(CONSUMER_THREADS);
}
#endif

#if !NORM && !X_SLABS
// Copies all rows of x unchanged to shared memory. The consumer warps load them themselves, because these
// loads have lower latency than bulk copies.
DEV void stage_x_rows(const BlockWork& work, const SharedMemoryLayout& s, const half_t* x, u32 x_stride) {
    enum : u32 { LOADS_IN_FLIGHT = 4 };
    const u32 pieces = work.k / 8, line = x_line(work.k);
    u32 row = 0, piece = tid();
#pragma unroll 1
    while (row < work.m) {
        u32x4 v[LOADS_IN_FLIGHT];
        u32 to[LOADS_IN_FLIGHT];
        UNROLL for (u32 i = 0; i < LOADS_IN_FLIGHT; ++i) {
            for (; piece >= pieces; piece -= pieces) ++row;
            to[i] = row < work.m ? row * line + piece * 16 : ~0u;
            if (row < work.m) v[i] = *(const u32x4*)(x + (u64)row * x_stride + piece * 8);
            piece += CONSUMER_THREADS;
        }
        UNROLL for (u32 i = 0; i < LOADS_IN_FLIGHT; ++i)
            if (to[i] != ~0u) *(u32x4*)(s.x + to[i]) = v[i];
        for (; piece >= pieces; piece -= pieces) ++row;
    }
    named_barrier_sync<1>(CONSUMER_THREADS);
}
#endif
