// qk_rope.h - q/k norm and RoPE of one head by a group of lanes, for the qk_rope kernel and for kernels that
// fuse it.
//
// Defines: -DHEAD_DIM (a multiple of 16), -DROTARY_DIM (number of rotated channels; even, <= HEAD_DIM). Half
// pairing (NeoX style): channel p is rotated with p + ROTARY_DIM / 2. A lane has pairs of runs (RUN
// consecutive channels each): a low run and the high run with which RoPE rotates it, so that lanes need not
// exchange values. Channels from ROTARY_DIM on are also assigned in pairs of runs, and are not rotated.
// Rounding points, as in cpu/qk_rope.rs: x * scale, its product with the weight, and the rotated value are
// each rounded to ACT; with -DNORM_F32=1 x * scale is not rounded (norm/norm.h).
#pragma once
#include "norm/norm.h"
#include "qk_rope/rotate.h"

DEV constexpr u32 group_for(u32 runs) {
    u32 lanes = 1;
    while (lanes < runs && lanes < 32) lanes *= 2;
    return lanes;
}

enum : u32 {
    HALF = ROTARY_DIM / 2,
    RUN = HALF % 4 == 0 ? 4 : HALF % 2 == 0 ? 2 : 1,  // channels per load
    RUNS = HEAD_DIM / 2 / RUN,                        // pairs of runs in a head
    GROUP = group_for(RUNS),                          // lanes that share a head
    RUN_PAIRS = (RUNS + GROUP - 1) / GROUP,           // pairs of runs per lane
};

template <class T> struct alignas(RUN * sizeof(T)) ChannelRun { T v[RUN]; };

// The channels of one head that a lane has, in f32: pairs of runs (RUN consecutive channels), where RoPE
// rotates run `low` with run `high`.
struct LaneHeadChannels {
    float low[RUN_PAIRS][RUN], high[RUN_PAIRS][RUN];
};

// Location of a pair of runs (RUN consecutive channels each) of a lane: first channels of the low and the
// high run, whether RoPE rotates the pair, and whether the pair exists.
struct ChannelRunLocation {
    u32 low, high;
    bool rotated, exists;
};
DEV ChannelRunLocation run_location(u32 pair, u32 member) {
    const u32 run = pair * GROUP + member, p = run * RUN;
    const bool rotated = p < HALF;
    const u32 low = rotated ? p : 2 * p;
    return ChannelRunLocation{low, rotated ? p + HALF : 2 * p + RUN, rotated, run < RUNS};
}

template <class T> DEV void load_run(float* to, const T* from) {
    const ChannelRun<T> run = *(const ChannelRun<T>*)from;
    for (u32 i = 0; i < RUN; ++i) to[i] = f32(run.v[i]);
}
template <class T> DEV void store_run(T* to, const float* from, float factor) {
    ChannelRun<T> run;
    for (u32 i = 0; i < RUN; ++i) run.v[i] = ::to<T>(from[i] * factor);
    *(ChannelRun<T>*)to = run;
}

template <class T> DEV LaneHeadChannels load_head(const T* x, u32 member) {
    LaneHeadChannels part;
    for (u32 t = 0; t < RUN_PAIRS; ++t) {
        const ChannelRunLocation location = run_location(t, member);
        if (!location.exists) continue;
        load_run(part.low[t], x + location.low);
        load_run(part.high[t], x + location.high);
    }
    return part;
}

// Multiplies the channels that this lane has of a head by `factor`, and stores them.
template <class T> DEV void store_head(T* y, const LaneHeadChannels& part, u32 member, float factor) {
    for (u32 t = 0; t < RUN_PAIRS; ++t) {
        const ChannelRunLocation location = run_location(t, member);
        if (!location.exists) continue;
        store_run(y + location.low, part.low[t], factor);
        store_run(y + location.high, part.high[t], factor);
    }
}

// Applies RMS norm to a head. `w`: norm weights of the channels that this lane has. Every lane of the warp
// must call it.
DEV void norm_head(LaneHeadChannels& part, const LaneHeadChannels& w, float eps, u32 member) {
    float squares = 0.f;
    for (u32 t = 0; t < RUN_PAIRS; ++t) {
        if (!run_location(t, member).exists) continue;
        for (u32 i = 0; i < RUN; ++i) squares = fma_(part.low[t][i], part.low[t][i], squares);
        for (u32 i = 0; i < RUN; ++i) squares = fma_(part.high[t][i], part.high[t][i], squares);
    }
    const float scale = inverse_rms(group_sum<GROUP>(squares), HEAD_DIM, eps);
    for (u32 t = 0; t < RUN_PAIRS; ++t)
        for (u32 i = 0; i < RUN; ++i) {
            part.low[t][i] = f32(to<ACT>(normed(part.low[t][i], scale, w.low[t][i])));
            part.high[t][i] = f32(to<ACT>(normed(part.high[t][i], scale, w.high[t][i])));
        }
}

// Loads the cosines (in `low`) and sines (in `high`) of a position for the lane's channels; undefined for
// channels that are not rotated.
DEV LaneHeadChannels load_rotation(const float* cos, const float* sin, u32 member) {
    LaneHeadChannels rotation;
    for (u32 t = 0; t < RUN_PAIRS; ++t) {
        const ChannelRunLocation location = run_location(t, member);
        if (!location.exists || !location.rotated) continue;
        load_run(rotation.low[t], cos + location.low);
        load_run(rotation.high[t], sin + location.low);
    }
    return rotation;
}

DEV void rope_head(LaneHeadChannels& part, const LaneHeadChannels& rotation, u32 member) {
    for (u32 t = 0; t < RUN_PAIRS; ++t) {
        const ChannelRunLocation location = run_location(t, member);
        if (!location.exists || !location.rotated) continue;
        for (u32 i = 0; i < RUN; ++i) {
            const float a = part.low[t][i], b = part.high[t][i], c = rotation.low[t][i], s = rotation.high[t][i];
            part.low[t][i] = f32(to<ACT>(rotated_low(a, b, c, s)));
            part.high[t][i] = f32(to<ACT>(rotated_high(a, b, c, s)));
        }
    }
}
