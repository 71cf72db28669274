// gdn/state_slice.h - the recurrent form of the gated delta rule: a block has SLICE value columns of the state of a head in
// registers, and its warps divide the key channels. gdn.hip and gdn_replay.hip share this file, so that both compute the
// same bits.
//
// Sums over keys: a lane adds its channels in the order of summed_channel(), then the lanes of a warp are added as a tree,
// then the warps in ascending order. The result of a row does not depend on other rows.
#pragma once
#include "dev/vector4.h"
#include "gdn/gates.h"

enum : u32 {
    SLICE = 64,                                 // value columns of a block: 256 consecutive bytes of a row of the state
    SLICE_WARPS = 4,                            // warps of a block
    COLUMN_LANES = SLICE / 4,                   // groups of lanes in a warp, each with four value columns
    WARP_KEY_LANES = WARP_SIZE / COLUMN_LANES,  // lanes of a group
    KEY_LANES = SLICE_WARPS * WARP_KEY_LANES,   // lanes over which the key channels are divided
    LANE_KEYS = KEY_DIM / KEY_LANES,            // key channels of a lane
    RUN = LANE_KEYS % 8 == 0 ? 8 : LANE_KEYS % 4 == 0 ? 4 : 1  // consecutive key channels of a lane
};

DEV u32 key_lane() { return warp_id() * WARP_KEY_LANES + lane() % WARP_KEY_LANES; }
// Returns key channel i of this lane.
DEV u32 key_channel(u32 i) { return i / RUN * (RUN * KEY_LANES) + key_lane() * RUN + i % RUN; }

// Returns the n-th channel that a lane adds: the even ones, then the odd ones. clang adds neighbouring channels of 16 bits by
// v_dot2 on AMD, which rounds otherwise.
DEV u32 summed_channel(u32 n) {
    constexpr u32 EVEN = (LANE_KEYS + 1) / 2;
    return n < EVEN ? 2 * n : 2 * (n - EVEN) + 1;
}

// Four value columns of a head, in which this lane has LANE_KEYS key channels.
struct SliceColumns {
    u32 head, column;
    bool present;  // false after the last column of a head whose columns are no multiple of SLICE
};
DEV SliceColumns slice_columns(u32 slice, u32 value_dim) {
    const u32 slices = (value_dim + SLICE - 1) / SLICE;
    const u32 column = slice % slices * SLICE + lane() / WARP_KEY_LANES * 4;
    return {slice / slices, column, column < value_dim};
}
// Offset of the first of the columns in the states of all heads.
DEV u64 state_offset(const SliceColumns& at, u32 value_dim) { return (u64)at.head * KEY_DIM * value_dim + at.column; }

struct StateSlice { float s[LANE_KEYS][4]; };

// Loads the columns at `from`, or zeros if `present` is false.
DEV void load_slice(StateSlice& state, const float* from, u32 value_dim, bool present) {
    UNROLL for (u32 i = 0; i < LANE_KEYS; ++i) {
        f32x4 row = {{0.f, 0.f, 0.f, 0.f}};
        if (present) row = *(const f32x4*)(from + (u64)key_channel(i) * value_dim);
        UNROLL for (u32 j = 0; j < 4; ++j) state.s[i][j] = row.v[j];
    }
}
DEV void store_slice(float* to, const StateSlice& state, u32 value_dim) {
    UNROLL for (u32 i = 0; i < LANE_KEYS; ++i) {
        const f32x4 row = {{state.s[i][0], state.s[i][1], state.s[i][2], state.s[i][3]}};
        *(f32x4*)(to + (u64)key_channel(i) * value_dim) = row;
    }
}

// Key channels of this lane in a query or key.
struct LaneKeys { float v[LANE_KEYS]; };
DEV LaneKeys load_keys(const ACT* head) {
    LaneKeys keys;
    UNROLL for (u32 i = 0; i < LANE_KEYS; i += RUN) {
        const ACT* from = head + key_channel(i);
        if constexpr (RUN == 8) {
            const f32x8 run = load8(from);
            UNROLL for (u32 j = 0; j < 8; ++j) keys.v[i + j] = run.v[j];
        } else if constexpr (RUN == 4) {
            const f32x4 run = load4(from);
            UNROLL for (u32 j = 0; j < 4; ++j) keys.v[i + j] = run.v[j];
        } else {
            keys.v[i] = f32(*from);
        }
    }
    return keys;
}

// N sums over key channels for each group of lanes.
template <u32 N> struct KeySums { float v[N]; };
// Memory for the sums of the warps; successive tokens use different parts, so that one barrier per token is enough.
template <u32 N> struct WarpSums { float v[SLICE_WARPS][COLUMN_LANES][N]; };

// Adds the sums of all lanes with the same columns. Every thread of the block must call it.
template <u32 N> DEV void add_lanes(KeySums<N>& sums, WarpSums<N>& parts) {
    const u32 group = lane() / WARP_KEY_LANES;
    UNROLL for (u32 n = 0; n < N; ++n) sums.v[n] = group_sum<WARP_KEY_LANES>(sums.v[n]);
    if (lane() % WARP_KEY_LANES == 0) UNROLL for (u32 n = 0; n < N; ++n) parts.v[warp_id()][group][n] = sums.v[n];
    wait_shared();
    sync();
    UNROLL for (u32 n = 0; n < N; ++n) {
        sums.v[n] = parts.v[0][group][n];
        UNROLL for (u32 w = 1; w < SLICE_WARPS; ++w) sums.v[n] += parts.v[w][group][n];
    }
}

// Factor and strength of the update by a token.
struct TokenGates { float shrink, strength; };

DEV float key_scale(float kk) { return rsqrt_(kk + 1e-6f); }

// Returns strength * (v - shrink * k^T s) of a column. `sk`: product of the column with the key before its normalization.
DEV float delta_of(const TokenGates& gates, float v, float k_scale, float sk) {
    return gates.strength * (v - gates.shrink * k_scale * sk);
}

// s = shrink * s + k delta^T
DEV void update_slice(StateSlice& state, const LaneKeys& k, const float (&delta)[4], float shrink) {
    UNROLL for (u32 i = 0; i < LANE_KEYS; ++i)
        UNROLL for (u32 j = 0; j < 4; ++j) state.s[i][j] = fma_(k.v[i], delta[j], shrink * state.s[i][j]);
}
