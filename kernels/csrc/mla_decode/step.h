// mla_decode/step.h - a step of KEYS rows against 16 heads: HALVES warps have the scores of 16 rows, each over its part of the
// channels, since no warp has registers for all of a query's. Probabilities go to all warps through shared memory; then a warp
// adds up its own channels of all rows. Warps of other tokens do the same at the same time, and all meet at the same barriers.
#pragma once

enum : u32 {
    PRODUCTS = WIDTH / 16 / HALVES, // of a warp's part of a score
    OWN = LATENT / TOKEN_WARPS / 16, // tiles of 16 channels of a warp
    SHARERS = WARP_SIZE == 64 ? 16 : 4,  // neighbouring lanes that have scores of the same heads
    SLOTS = WARP_SIZE == 64 ? 4 : 2,     // heads of a lane
    WEIGHTS = KEYS + 8                   // elements from head to head in shared memory
};
// Below every score, and a difference of two of them is still a number.
#define NO_SCORE (-1e30f)

// Element i of a lane's product belongs to the lane's head so and so.
DEV u32 slot_of(u32 i) { return WARP_SIZE == 64 ? i : i >> 1 & 1; }
DEV u32 head_of(u32 slot) { return Frag::c_row(WARP_SIZE == 64 ? slot : slot * 2); }

struct Source {
    const half_t *taken, *q;
    u32 heads, query, q_stride;
};
struct Pairs { u32 v[Frag::NA / 2]; };
struct Queries { Pairs v[PRODUCTS]; };
struct Running {
    float max[SLOTS], sum[SLOTS];  // sum: of this lane's keys only, until the end
    FragC out[OWN];
};

// Of heads and tokens that do not exist: zeros.
DEV Queries load_queries(const Source& s, const Place& p) {
    Queries all;
    UNROLL for (u32 i = 0; i < Frag::NA; i += 2) {
        const u32 head = first_head() + Frag::a_row(i);
        const bool real = head < s.heads && own_token() < p.count;
        const u64 token = p.token + own_token();
        const half_t* taken = s.taken + (token * s.heads + head) * LATENT;
        const half_t* turned = s.q + token * s.q_stride + (head + 1) * s.query - ROTARY;
        UNROLL for (u32 j = 0; j < PRODUCTS; ++j) {
            const u32 k = (half_of_warp() * PRODUCTS + j) * 16 + Frag::a_k(i);
            const half_t* from = k < LATENT ? taken + k : turned + (k - LATENT);
            all.v[j].v[i / 2] = real ? bits_as<u32>(*(const half_x2*)from) : 0;
        }
    }
    return all;
}

DEV void start(Running& r) {
    UNROLL for (u32 i = 0; i < SLOTS; ++i) {
        r.max[i] = NO_SCORE;
        r.sum[i] = 0.f;
    }
    UNROLL for (u32 i = 0; i < OWN; ++i) r.out[i] = zero_c();
}

// Of the warp's rows; on warps of the first half alone. Two chains of sums: one waits for its matrix unit.
DEV FragC score(const Queries& q, const half_t* step) {
    const half_t* rows = step + tile_of_warp() * TILE * LINE + half_of_warp() * PRODUCTS * 16;
    FragC even = zero_c(), odd = zero_c();
    UNROLL for (u32 j = 0; j < PRODUCTS; ++j)
        mma16(j & 1 ? odd : even, bits_as<FragA>(q.v[j]), load_b(rows + j * 16, LINE));
    UNROLL for (u32 i = 0; i < Frag::NC; ++i) even.x[i] += odd.x[i];
    if (HALVES == 1) return even;
    SHARED(float, parts, TOGETHER * KEYS * 16);
    float* part = parts + (own_token() * TILES + tile_of_warp()) * TILE * 16 + lane();
    if (half_of_warp() == 1) UNROLL for (u32 i = 0; i < Frag::NC; ++i) part[i * WARP_SIZE] = even.x[i];
    team_sync();
    if (half_of_warp() == 0) UNROLL for (u32 i = 0; i < Frag::NC; ++i) even.x[i] += part[i * WARP_SIZE];
    return even;
}

// What warps of a token tell each other of a step.
DEV half_t* step_weights() {
    SHARED(half_x8, weights, TOGETHER * 16 * WEIGHTS / 8);
    return (half_t*)weights + own_token() * 16 * WEIGHTS;
}

// The maxima of all warps, and by what sums of earlier steps shrink; whether any does.
DEV bool grow(Running& r, const FragC& s, float* shrink) {
    SHARED(float, all_highs, TOGETHER * TILES * 16);
    float* highs = all_highs + own_token() * TILES * 16;
    UNROLL for (u32 slot = 0; slot < SLOTS; ++slot) {
        float high = NO_SCORE;
        UNROLL for (u32 i = 0; i < Frag::NC; ++i) high = slot_of(i) == slot ? fmax_(high, s.x[i]) : high;
        high = group_max<SHARERS>(high);
        if (half_of_warp() == 0 && lane() % SHARERS == 0) highs[tile_of_warp() * 16 + head_of(slot)] = high;
    }
    team_sync();
    bool grows = false;
    UNROLL for (u32 slot = 0; slot < SLOTS; ++slot) {
        float max = r.max[slot];
        UNROLL for (u32 i = 0; i < TILES; ++i) max = fmax_(max, highs[i * 16 + head_of(slot)]);
        grows |= max > r.max[slot];
        shrink[slot] = exp2_(r.max[slot] - max);
        r.max[slot] = max;
    }
    return grows;
}

// Makes probabilities of scores, for all warps: rows [0, seen) of the step exist, the first of which is key `at`; `factor` =
// scale * log2(e).
DEV void weigh(Running& r, FragC s, u32 at, u32 seen, float factor) {
    UNROLL for (u32 i = 0; i < Frag::NC; ++i) {
        const u32 key = tile_of_warp() * TILE + Frag::c_col(i);
        const bool sees = key < seen && (UNSEEN == 0 || at + key >= UNSEEN);
        s.x[i] = sees ? s.x[i] * factor : NO_SCORE;
    }
    float shrink[SLOTS];
    const bool grows = grow(r, s, shrink);
    UNROLL for (u32 slot = 0; slot < SLOTS; ++slot) r.sum[slot] *= shrink[slot];
    half_t* weights = step_weights();
    if (half_of_warp() == 0) UNROLL for (u32 i = 0; i < Frag::NC; ++i) {
        const float p = exp2_(s.x[i] - r.max[slot_of(i)]);
        r.sum[slot_of(i)] += p;
        weights[Frag::c_row(i) * WEIGHTS + tile_of_warp() * TILE + Frag::c_col(i)] = to_half(p);
    }
    if (warp_any(grows))
        UNROLL for (u32 j = 0; j < OWN; ++j)
            UNROLL for (u32 i = 0; i < Frag::NC; ++i) r.out[j].x[i] *= shrink[slot_of(i)];
    team_sync();
}

// out += probabilities * the warp's channels of all rows.
DEV void add_compressed_kv(Running& r, const half_t* step) {
    UNROLL for (u32 k = 0; k < TILES; ++k) {
        const FragA a = load_a(step_weights() + k * TILE, WEIGHTS);
        const half_t* rows = step + k * TILE * LINE + warp_of_token() * OWN * 16;
        UNROLL for (u32 j = 0; j < OWN; ++j) mma16(r.out[j], a, load_b_trans(rows + j * 16, LINE));
    }
}

// The sums of all keys, tiles ascending.
DEV void finish(Running& r) {
    SHARED(float, all_sums, TOGETHER * TILES * 16);
    float* sums = all_sums + own_token() * TILES * 16;
    UNROLL for (u32 slot = 0; slot < SLOTS; ++slot) {
        const float sum = group_sum<SHARERS>(r.sum[slot]);
        if (half_of_warp() == 0 && lane() % SHARERS == 0) sums[tile_of_warp() * 16 + head_of(slot)] = sum;
    }
    team_sync();
    UNROLL for (u32 slot = 0; slot < SLOTS; ++slot) {
        r.sum[slot] = 0.f;
        UNROLL for (u32 i = 0; i < TILES; ++i) r.sum[slot] += sums[i * 16 + head_of(slot)];
    }
    team_sync();  // The next split may have no step.
}
