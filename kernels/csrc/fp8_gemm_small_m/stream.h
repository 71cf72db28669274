// fp8_gemm_small_m/stream.h - product of up to 16 rows of x with an fp8 W that bulk copies load into shared
// memory. The algorithm is that of gemm_small_m/stream.h, with half as many bytes per weight. Weights are
// converted exactly to f16 in registers, two per instruction. The sum over 128 columns (K) is multiplied by
// its scale when it is added to the sum of the warp.
//
// Order of additions: groups of 64 columns, then the groups of a warp in ascending order, then the warps in
// ascending order. It depends only on K and SLAB.
#pragma once
#include "dev/bulk.h"
#include "dev/fp8_f16.h"
#include "fp8_gemm_small_m/share.h"

// Index of the current ring-buffer stage, and the parity of its phase for barrier_wait().
struct PipelineState { u32 stage, phase; };
DEV void next(PipelineState& t, u32 stages) {
    if (++t.stage < stages) return;
    t.stage = 0;
    t.phase ^= 1;
}

// Returns the number of rows of x that a producer warp copies: every PRODUCER_WARPS-th row. The rows of W of
// a stage are divided equally among the producer warps.
DEV u32 own_rows(const BlockWork& work, u32 producer_warp) {
    return (work.m + PRODUCER_WARPS - 1 - producer_warp) / PRODUCER_WARPS;
}
DEV void copy_weights(const BlockWork& work, const SharedMemoryLayout& s, u32 stage, u32 pass, u32 slab, u64 policy) {
    const u32 bytes = columns(work, slab), lines = strips_of(work, pass) * STRIP_ROWS / PRODUCER_WARPS;
    const u32 producer_warp = warp_id() - COMPUTE_WARPS;
    if (lane() == 0) barrier_expect(s.full + stage, (lines + (X_SLABS ? 2 * own_rows(work, producer_warp) : 0)) * bytes);
    warp_sync();
#pragma unroll 1
    for (u32 i = lane(); i < lines; i += WARP_SIZE) {
        const u32 line = producer_warp * lines + i;
        bulk_copy_once(s.ring + stage * s.stage_bytes + line * LINE,
                       work.w + weight_row(work, pass, line) * work.k + slab * SLAB, bytes, s.full + stage, policy);
    }
}
DEV void copy_rows(const BlockWork& work, const SharedMemoryLayout& s, u32 stage, u32 slab, const half_t* x) {
    u8* to = s.ring + stage * s.stage_bytes + LINES * LINE;
    const u32 producer_warp = warp_id() - COMPUTE_WARPS, row = lane() * PRODUCER_WARPS + producer_warp;
    if (row < work.m)
        bulk_copy(to + row * X_LINE, x + (u64)row * work.k + slab * SLAB, columns(work, slab) * 2, s.full + stage);
}

// Waits for the previous kernel, then starts the copies of x: with X_SLABS the columns of x for the stages
// whose weight copies have already been started, otherwise with PREPARED all of x.
DEV void first_rows(const BlockWork& work, const SharedMemoryLayout& s, u32 ahead, const half_t* x) {
    grid_launch_dependents();
    grid_wait();
#if X_SLABS
#pragma unroll 1
    for (u32 i = 0; i < ahead; ++i) copy_rows(work, s, i, i % slabs(work), x);
#elif PREPARED
    if (warp_id() != COMPUTE_WARPS) return;
    if (lane() == 0) barrier_expect(s.rows, work.m * work.k * 2);
    warp_sync();
    if (lane() < work.m) bulk_copy(s.x + lane() * x_line(work.k), x + (u64)lane() * work.k, work.k * 2, s.rows);
#endif
}

// Weights of the next GEMM to prefetch: of each of its `blocks` blocks, the first `bytes` bytes of every row
// of W that the block reads in its first pass. `blocks` is 0 if nothing is to be prefetched.
struct PrefetchWork { const fp8* w; u32 outputs, halves, k, strips, blocks, bytes; };

// Prefetches weights of the next GEMM into L2. After the last weight copies of this kernel, memory would
// otherwise be idle until the next GEMM starts its copies.
DEV void prefetch_l2(const PrefetchWork& a) {
    if (bid_x() >= a.blocks) return;
    const u32 width = STRIP_ROWS / a.halves, all = (a.outputs + width - 1) / width, each = all / a.blocks;
    const u32 more = all - each * a.blocks, first = (bid_x() * each + (bid_x() < more ? bid_x() : more)) * width;
    const u32 half = a.strips * width;
#pragma unroll 1
    for (u32 line = (warp_id() - COMPUTE_WARPS) * WARP_SIZE + lane(); line < a.strips * STRIP_ROWS;
         line += PRODUCER_WARPS * WARP_SIZE) {
        const u32 out = first + line % half;
        if (out < a.outputs) prefetch_l2(a.w + (u64)(out + (line < half ? 0 : a.outputs)) * a.k, a.bytes);
    }
}

// Loop of a producer warp: copies weights, and with X_SLABS columns of x, into the ring buffer.
DEV void copy_all(const BlockWork& work, const SharedMemoryLayout& s, const half_t* x, const PrefetchWork& ahead) {
    const u32 per_pass = slabs(work), all = passes(work);
    const u64 policy = read_once();
    u32 i = 0;
    PipelineState pipe{0, 0};
    bool waited = false;
#pragma unroll 1
    for (u32 pass = 0; pass < all; ++pass) {
#pragma unroll 1
        for (u32 slab = 0; slab < per_pass; ++slab, ++i) {
            if (i == s.stages) {
                first_rows(work, s, s.stages, x);
                waited = true;
            }
            if (waited) barrier_wait(s.empty + pipe.stage, pipe.phase ^ 1);
            copy_weights(work, s, pipe.stage, pass, slab, policy);
            if (X_SLABS && waited) copy_rows(work, s, pipe.stage, slab, x);
            next(pipe, s.stages);
        }
    }
    prefetch_l2(ahead);
    if (!waited) first_rows(work, s, i, x);
}

// Copies the weight scales of this block to shared memory, as [strip][gate or up][block of 128 columns];
// called before grid_wait().
DEV void keep_scales(const BlockWork& work, const SharedMemoryLayout& s, const float* scales, u32 unit, u32 stride) {
    const u32 blocks = blocks_k(work.k);
#pragma unroll 1
    for (u32 i = tid(); i < work.strips * HALVES * blocks; i += CONSUMER_THREADS) {
        const u32 strip = i / blocks / HALVES, out = (work.first + strip) * WIDTH;
        const u32 row = out + i / blocks % HALVES * outputs(work);
        s.scales[i] = scales[(u64)(row / unit) * stride + i % blocks];
    }
}

// Byte offsets of the elements of x that a lane loads: 16 consecutive columns (K) of row lane / 4, and with
// MORE_ROWS also of row lane / 4 + 8. To avoid branches, rows out of range use the address of a valid row;
// their results are discarded.
struct XRowOffsets { u32 at[OCTETS]; };
DEV XRowOffsets x_rows(u32 m, u32 line) {
    XRowOffsets x;
    UNROLL for (u32 j = 0; j < OCTETS; ++j) {
        const u32 row = (lane() >> 2) + j * 8;
        x.at[j] = (row < m ? row : 0) * line + (lane() & 3) * 32;
    }
    return x;
}
// MMA operand in the registers of a lane: 16 consecutive columns (K) of one row of x, or of two rows with
// MORE_ROWS.
struct RowPieces { u32x4 v[OCTETS][2]; };
DEV RowPieces load_rows(const u8* x, const XRowOffsets& rows, u32 counts) {
    RowPieces r;
    UNROLL for (u32 j = 0; j < OCTETS; ++j)
        UNROLL for (u32 i = 0; i < 2; ++i) {
            r.v[j][i] = ((const u32x4*)(x + rows.at[j]))[i];
            UNROLL for (u32 e = 0; e < 4; ++e) r.v[j][i].v[e] &= counts;
        }
    return r;
}

// Accumulators of a lane for two strips (8 rows of W each), whose 16 rows are the rows (M) of the MMA. A lane
// has row lane / 4 of each strip, and rows lane % 4 * 2 and lane % 4 * 2 + 1 of each group of 8 rows of x.
struct StripPairAccumulators { f32x4 c[OCTETS]; };
// Accumulators of a lane for all strips of a pass, in pairs of strips.
struct PassAccumulators { StripPairAccumulators of[PAIRS]; };
DEV StripPairAccumulators no_sum() {
    StripPairAccumulators s;
    UNROLL for (u32 j = 0; j < OCTETS; ++j) s.c[j] = f32x4{{0.f, 0.f, 0.f, 0.f}};
    return s;
}

// Adds to `s` the product of x with two strips of W over 64 columns (K), of which this lane has 16
// consecutive columns. `first`, `second`: the weights of this lane in the first and the second strip.
DEV void multiply_pieces(StripPairAccumulators& s, const RowPieces& x, const u32x4& first, const u32x4& second) {
    UNROLL for (u32 i = 0; i < 4; ++i) {
        const u32 a0 = widen_fp8(first.v[i]), a1 = widen_fp8(second.v[i]);
        const u32 a2 = widen_fp8(first.v[i] >> 16), a3 = widen_fp8(second.v[i] >> 16);
        UNROLL for (u32 j = 0; j < OCTETS; ++j)
            mma_f16(s.c[j], a0, a1, a2, a3, x.v[j][i / 2].v[i % 2 * 2], x.v[j][i / 2].v[i % 2 * 2 + 1]);
    }
}

// Offsets of the weights and scales that a lane reads, equal for all slabs (ring-buffer stages) of a pass;
// one entry for each strip of each pair of strips.
struct WeightLineOffsets {
    u32 weights[PAIRS][2];  // offset in the stage of the lane's part of its line, in bytes
    u32 scales[PAIRS][2];   // index of the line's scale for the first block of k
};
DEV WeightLineOffsets lines_of(const BlockWork& work, u32 pass) {
    const u32 strips = strips_of(work, pass), r = lane() >> 2, half = GATED && r >= WIDTH ? 1 : 0;
    WeightLineOffsets l;
    UNROLL for (u32 p = 0; p < PAIRS; ++p)
        UNROLL for (u32 i = 0; i < 2; ++i) {
            const u32 strip = p * 2 + i < strips ? p * 2 + i : 0;
            l.weights[p][i] = line_of(strips, strip, r) * LINE + (lane() & 3) * 16;
            l.scales[p][i] = ((pass * TILES + strip) * HALVES + half) * blocks_k(work.k);
        }
    return l;
}

// Adds the product of x and W over the columns (K) that share one weight scale: 128 columns, or 64 if `both`
// is false. `scales`: weight scales of these columns.
DEV void multiply_block(PassAccumulators& sums, const u8* x, const XRowOffsets& rows, const u8* w, const float* scales,
                        const WeightLineOffsets& lines, bool both) {
    enum : u32 { STEPS = SPAN < BLOCK_K ? 1 : 2 };
    const u32 step = both ? 64 : 0;
    RowPieces pieces[STEPS];
    UNROLL for (u32 i = 0; i < STEPS; ++i) pieces[i] = load_rows(x + i * step * 2, rows, i == 0 || both ? ~0u : 0u);
    UNROLL for (u32 p = 0; p < PAIRS; ++p) {
        StripPairAccumulators part = no_sum();
        UNROLL for (u32 i = 0; i < STEPS; ++i)
            multiply_pieces(part, pieces[i], *(const u32x4*)(w + lines.weights[p][0] + i * step),
                            *(const u32x4*)(w + lines.weights[p][1] + i * step));
        UNROLL for (u32 strip = 0; strip < 2; ++strip) {
            const float factor = CHANNELS ? 1.f : scales[lines.scales[p][strip]];
            UNROLL for (u32 j = 0; j < OCTETS; ++j)
                UNROLL for (u32 e = strip * 2; e < strip * 2 + 2; ++e)
                    sums.of[p].c[j].v[e] = fma_(part.c[j].v[e], factor, sums.of[p].c[j].v[e]);
        }
    }
}

// Adds the product over the columns (K) of one slab (ring-buffer stage) that this warp processes. `width`:
// number of columns of the slab.
DEV void multiply_slab(PassAccumulators& sums, const u8* x, const XRowOffsets& rows, const u8* w, const float* scales,
                       const WeightLineOffsets& lines, u32 width) {
    const u32 end = (warp_id() + 1) * SPAN < width ? (warp_id() + 1) * SPAN : width;
#pragma unroll 1
    for (u32 at = warp_id() * SPAN; at < end; at += BLOCK_K)
        multiply_block(sums, x + at * 2, rows, w + at, scales + at / BLOCK_K, lines, at + 64 < end);
}

// Writes the sums of this warp for the pass to shared memory as [strip][row of x][row of the strip].
DEV void put_pass(const PassAccumulators& sums, const SharedMemoryLayout& s, u32 m) {
    float* to = s.sums + warp_id() * TILES * m * STRIP_ROWS + (lane() >> 2);
    UNROLL for (u32 j = 0; j < OCTETS; ++j)
        UNROLL for (u32 e = 0; e < 2; ++e) {
            const u32 row = j * 8 + (lane() & 3) * 2 + e;
            if (row < m)
                UNROLL for (u32 t = 0; t < TILES; ++t)
                    to[(t * m + row) * STRIP_ROWS] = sums.of[t / 2].c[j].v[t % 2 * 2 + e];
        }
}
DEV float gather_pass(const SharedMemoryLayout& s, u32 m, u32 t, u32 row, u32 r) {
    const u32 at = (t * m + row) * STRIP_ROWS + r, per_warp = TILES * m * STRIP_ROWS;
    float part[COMPUTE_WARPS];
    UNROLL for (u32 w = 0; w < COMPUTE_WARPS; ++w) part[w] = s.sums[w * per_warp + at];
    float sum = part[0];
    UNROLL for (u32 w = 1; w < COMPUTE_WARPS; ++w) sum += part[w];
    return sum * s.factors[row];
}

// Loop of the consumer warps. For every output of the block, one thread calls put(row, output, sum, up sum,
// loaded), where the up sum is used with GATED only. `loaded` is the result of before(row, output, exists),
// which every thread calls before the products, to load data of the epilogue early; `exists` is false on
// threads without an output.
template <class Before, class Put>
DEV void multiply_all(const BlockWork& work, const SharedMemoryLayout& s, const Before& before, const Put& put) {
    const u32 all = passes(work), per_pass = slabs(work), r = tid() % WIDTH;
    const XRowOffsets rows = x_rows(work.m, X_SLABS ? (u32)X_LINE : x_line(work.k));
    PipelineState pipe{0, 0};
#pragma unroll 1
    for (u32 pass = 0; pass < all; ++pass) {
        const WeightLineOffsets lines = lines_of(work, pass);
        const u32 strips = strips_of(work, pass), left = outputs(work) - first_output(work, pass);
        const auto is_output = [&](u32 t, u32 row) { return row < work.m && t < strips && t * WIDTH + r < left; };
        const u32 t0 = tid() / WIDTH % TILES, row0 = tid() / WIDTH / TILES;
        const auto loaded = before(row0, first_output(work, pass) + t0 * WIDTH + r, is_output(t0, row0));
        PassAccumulators sums;
        UNROLL for (u32 p = 0; p < PAIRS; ++p) sums.of[p] = no_sum();
#pragma unroll 1
        for (u32 slab = 0; slab < per_pass; ++slab) {
            const u8* w = s.ring + pipe.stage * s.stage_bytes;
            barrier_wait(s.full + pipe.stage, pipe.phase);
            const u8* x = X_SLABS ? w + LINES * LINE : s.x + slab * SLAB * 2;
            multiply_slab(sums, x, rows, w, s.scales + slab * SLAB / BLOCK_K, lines, columns(work, slab));
            warp_sync();
            if (lane() == 0) barrier_arrive(s.empty + pipe.stage);
            next(pipe, s.stages);
        }
        if (pass > 0) named_barrier_sync<1>(CONSUMER_THREADS);
        put_pass(sums, s, work.m);
        named_barrier_sync<1>(CONSUMER_THREADS);
#pragma unroll 1
        for (u32 i = tid(); i < work.m * TILES * WIDTH; i += CONSUMER_THREADS) {
            const u32 t = i / WIDTH % TILES, row = i / WIDTH / TILES, out = first_output(work, pass) + t * WIDTH + r;
            if (!is_output(t, row)) continue;
            const float sum = gather_pass(s, work.m, t, row, r);
            const float up = GATED ? gather_pass(s, work.m, t, row, r + WIDTH) : 0.f;
            put(row, out, sum, up, i == tid() ? loaded : before(row, out, true));
        }
    }
}
