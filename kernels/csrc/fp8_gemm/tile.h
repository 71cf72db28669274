// fp8_gemm/tile.h - a block's tile of x W^T on tensor cores (matrix cores), both in fp8 with scales: 64 rows
// of x by 64 rows of W (called lines), in steps of 128 k through shared memory. The caller supplies the
// addresses of rows of x.
//
// A warp has 16 rows of x, and on warps of 32 lanes half of the lines. The sum over a step is multiplied by
// both scales when it is added to the output's accumulator. Sums are over ascending k, whatever the tile, so
// the result of a row is bit-identical in any batch.
// -DGATED=1: strips (STRIP_ROWS rows) of gate rows alternate with strips of the up rows of the same outputs,
// so that a lane has gate and up of an output.
#pragma once
#include "dev/strip_fp8.h"

#ifndef GATED
#  define GATED 0
#endif
#ifndef CHANNELS
#  define CHANNELS 0
#endif
// Whether the second half of the strips of a step is loaded from shared memory after the first half has been multiplied.
#ifndef SPLIT_STEP
#  define SPLIT_STEP 0
#endif

enum : u32 {
    TILE = 64,                               // rows of x per tile, and lines of W per tile
    STEP_K = 128,
    // Row stride. With 64 lanes, the order of the vectors of a row avoids bank conflicts: stage_offset().
    LINE = STEP_K + (WARP_SIZE == 64 ? 0 : 16),
    WARPS_N = 256 / WARP_SIZE / (TILE / 16),
    STRIPS = TILE / WARPS_N / STRIP_ROWS,    // strips per warp
    OWN = WARP_SIZE == 64 ? 4 : 2,           // rows of x for which a lane has outputs
    HALVES = GATED ? 2 : 1,
    OUTPUTS = TILE / HALVES
};
static_assert(STRIPS % HALVES == 0, "gate and up rows of an output are of one warp");

// The fp8 matrix W and its scales, and the index of the first output of the tile.
struct ScaledFp8Weights {
    const fp8* w;
    const float* scales;  // one per `unit` outputs and 128 k, row stride scale_stride; unused with CHANNELS
    u32 first, n, k;      // first output of the tile; rows and columns of W
    u32 unit, scale_stride;
};

// Returns the row of W that line `line` of the tile contains (a line is a row of W in the tile). Lines beyond
// the last output repeat the row of the last output; their results are not stored.
DEV u32 line_row(const ScaledFp8Weights& w, u32 line) {
    const u32 strip = line / STRIP_ROWS, outputs = w.n / HALVES;
    const u32 out = w.first + strip / HALVES * STRIP_ROWS + line % STRIP_ROWS;
    return (out < outputs ? out : outputs - 1) + strip % HALVES * outputs;
}

#if WARP_SIZE == 64
#  include "dev/tile_copy.h"
// Returns the offset of columns [column, column + 16) of line `line` in a stage. The eight 16-byte vectors of a line are in an
// order that depends on the line, so that neither copies nor multiply_step() have bank conflicts.
DEV u32 stage_offset(u32 line, u32 column) { return line * LINE + (column ^ line % 8 * 16); }

// Two operands of strip_fp8_mma(): 16 successive columns of a line. The columns of a product differ from those in dev/strip.h, for both
// operands alike.
struct Fp8OperandPair { fp8x8 v[2]; };
DEV Fp8OperandPair operand_pair(const u8* stage, u32 line, u32 half) {
    return bits_as<Fp8OperandPair>(pinned(load_piece(stage + stage_offset(line, half * STEP_K / 2 + strip_k() * 2))));
}
#else
// Copies columns [at, at + 128) (K) of all rows of x and W of the tile to shared memory. x_row(r) returns the
// address of row r of x within the tile, or null for a row of zeros.
template <class Row> DEV void copy_step(u8* stage, const ScaledFp8Weights& w, const Row& x_row, u32 at) {
    for (u32 i = tid(); i < 2 * TILE * (STEP_K / 16); i += 256) {
        const u32 line = i / (STEP_K / 16), here = i % (STEP_K / 16) * 16;
        const fp8* row = line < TILE ? x_row(line) : w.w + (u64)line_row(w, line - TILE) * w.k;
        const bool present = row && at + here < w.k;
        cp_async16_zfill(stage + line * LINE + here, present ? row + at + here : w.w, present);
    }
    cp_async_commit();
    cp_async_wait<0>();
}
#endif

// Accumulators of a lane, one vector for each strip (STRIP_ROWS rows of W) of its warp.
struct TileAccumulators { f32x4 c[STRIPS]; };

DEV u32 first_row() { return warp_id() / WARPS_N * 16; }
DEV u32 first_line() { return warp_id() % WARPS_N * STRIPS * STRIP_ROWS; }
DEV u32 slot_row(u32 slot) { return WARP_SIZE == 64 ? strip_c_x(slot) : strip_c_x(slot * 2); }

// Scales of the rows of x of this lane, for the step over columns [at, at + 128). scale_of(i, r, block) returns
// the scale of row i of the lane, row r of the tile, for columns [128 block, 128 (block + 1)). With CHANNELS (one
// scale per row) the scales are 1 here, and scale_of() is not called.
struct RowScales { float x[OWN]; };
template <class Scale> DEV RowScales row_scales(const Scale& scale_of, u32 at) {
    RowScales scales;
    UNROLL for (u32 i = 0; i < OWN; ++i) scales.x[i] = CHANNELS ? 1.f : scale_of(i, first_row() + slot_row(i), at / STEP_K);
    return scales;
}

#if WARP_SIZE == 32
// Returns the scale of W for strip `t` (STRIP_ROWS rows of W) of this warp, for the step over columns [at, at
// + 128). All rows of a strip of which a lane has outputs are in one scale block.
DEV float strip_scale(const ScaledFp8Weights& w, u32 t, u32 at) {
    const u32 row = line_row(w, first_line() + t * STRIP_ROWS + strip_c_w(0));
    return CHANNELS ? 1.f : w.scales[(u64)(row / w.unit) * w.scale_stride + at / STEP_K];
}
#endif

// Returns the scale `bytes` after p. AMD GPUs add a 32-bit offset to an address in scalar registers.
DEV float scale_at(const float* p, u32 bytes) { return *(const float*)((const u8*)p + bytes); }

// Adds the products over one step of 128 columns (K) to `sums`. w_scale(t) returns the scale of W for strip t
// of this warp.
template <class Scale> DEV void multiply_step(TileAccumulators& sums, const u8* stage, const RowScales& scales,
                                              const Scale& w_scale) {
#if WARP_SIZE == 64
    Fp8OperandPair x[2];
    UNROLL for (u32 half = 0; half < 2; ++half) x[half] = operand_pair(stage, first_row() + strip_x_row(0), half);
#endif
    UNROLL for (u32 t = 0; t < STRIPS; ++t) {
#if SPLIT_STEP
        if (t == STRIPS / 2) __builtin_amdgcn_sched_barrier(0);
#endif
        const u32 strip = first_line() + t * STRIP_ROWS;
        f32x4 part{{0.f, 0.f, 0.f, 0.f}};
#if WARP_SIZE == 64
        UNROLL for (u32 half = 0; half < 2; ++half) {
            const Fp8OperandPair line = operand_pair(stage, TILE + strip + strip_w_row(), half);
            UNROLL for (u32 i = 0; i < 2; ++i) strip_fp8_mma(part, StripFp8OperandA{{x[half].v[i]}}, line.v[i]);
        }
#else
        UNROLL for (u32 k = 0; k < STEP_K; k += 32) {
            StripFp8OperandA x;
            UNROLL for (u32 j = 0; j < STRIP_X; ++j)
                x.v[j] = *(const fp8x8*)(stage + (first_row() + strip_x_row(j)) * LINE + k + strip_k());
            strip_fp8_mma(part, x, *(const fp8x8*)(stage + (TILE + strip + strip_w_row()) * LINE + k + strip_k()));
        }
#endif
        const float scale = w_scale(t);
        UNROLL for (u32 e = 0; e < 4; ++e)
            sums.c[t].v[e] = fma_(part.v[e], scale * scales.x[WARP_SIZE == 64 ? e : e / 2], sums.c[t].v[e]);
    }
}

template <class Row, class Scale> DEV TileAccumulators tile_product(const ScaledFp8Weights& w, const Row& x_row,
                                                                    const Scale& x_scale) {
    SHARED(u32x4, lines, 2 * TILE * LINE / 16);
    u8* stage = (u8*)lines;
    TileAccumulators sums;
    UNROLL for (u32 t = 0; t < STRIPS; ++t) sums.c[t] = f32x4{{0.f, 0.f, 0.f, 0.f}};
#if WARP_SIZE == 64
    TileCopy<fp8, 2 * TILE, STEP_K, 256, 2> copy;
    const auto line = [&](u32 r) -> const fp8* {
        return r < TILE ? x_row(r) : w.w + (u64)line_row(w, r - TILE) * w.k;
    };
    copy_lines(copy, line, w.w);
    RowScales x_scales[2];
    float w_scales[2][STRIPS];
    u32 from[STRIPS];  // of the scales of W of this lane, in bytes
    UNROLL for (u32 t = 0; t < STRIPS; ++t) {
        const u32 row = line_row(w, first_line() + t * STRIP_ROWS + strip_c_w(0));
        from[t] = CHANNELS ? 0 : row / w.unit * w.scale_stride * (u32)sizeof(float);
    }
    const auto load_scales = [&](u32 slot, u32 at) {
        x_scales[slot] = row_scales(x_scale, at);
        UNROLL for (u32 t = 0; t < STRIPS; ++t)
            w_scales[slot][t] = CHANNELS ? 1.f : scale_at(w.scales + at / STEP_K, from[t]);
    };
    const auto place = [](u32 line, u32 column) { return stage_offset(line, column); };
    copy_steps((fp8*)stage, place, copy, w.k, load_scales, [&](u32 slot) {
        multiply_step(sums, stage, x_scales[slot], [&](u32 t) { return w_scales[slot][t]; });
    });
#else
    for (u32 at = 0; at < w.k; at += STEP_K) {
        copy_step(stage, w, x_row, at);
        sync();
        multiply_step(sums, stage, row_scales(x_scale, at), [&](u32 t) { return strip_scale(w, t, at); });
        sync();
    }
#endif
    return sums;
}

// Calls put(row, output, sum), or with GATED put(row, output, gate sum, up sum), for every output that this
// lane has, including rows and outputs that are out of range; `row` is an index in the tile. On gfx942 sums
// are doubled, because W keeps its OCP fp8 bits, which in FNUZ represent half of the value.
template <class Put> DEV void each_output(const ScaledFp8Weights& w, const TileAccumulators& sums, const Put& put) {
    const float fnuz_factor = FP8_FNUZ ? 2.f : 1.f;
    UNROLL for (u32 t = 0; t < STRIPS; t += HALVES)
        UNROLL for (u32 e = 0; e < 4; ++e) {
            const u32 out = w.first + (first_line() + t * STRIP_ROWS) / HALVES + strip_c_w(e);
            const float up = GATED ? sums.c[t + HALVES - 1].v[e] * fnuz_factor : 0.f;
            put(first_row() + strip_c_x(e), out, sums.c[t].v[e] * fnuz_factor, up);
        }
}
