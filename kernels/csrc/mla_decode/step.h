// mla_decode/step.h - one step of MLA decode: KEYS rows of the pool times 16 heads. The scores of 16 rows are
// computed by HALVES warps, each over a part of the channels, because a whole query does not fit into the
// registers of a warp. The warps exchange probabilities through shared memory; then each warp accumulates a
// part of the output channels over all rows. If the block processes several tokens, each token has its own
// warps, which run the same steps at the same time and use the same barriers.
#pragma once

enum : u32 {
    PRODUCTS = WIDTH / 16 / HALVES, // MMAs per score and warp
    OWN = KV_LORA_RANK / TOKEN_WARPS / 16, // tiles of 16 channels that a warp accumulates
    SHARERS = WARP_SIZE == 64 ? 16 : 4,  // adjacent lanes that have scores of the same heads
    SLOTS = WARP_SIZE == 64 ? 4 : 2,     // heads per lane
    WEIGHTS = KEYS + 8                   // row stride of probabilities in shared memory, in elements
};
// Score of masked keys: less than every real score, and finite, so that NO_SCORE - NO_SCORE is 0, not NaN.
#define NO_SCORE (-1e30f)

// slot_of() returns which of a lane's heads (its slot) element i of an MMA fragment belongs to; head_of()
// returns the head of a slot.
DEV u32 slot_of(u32 i) { return WARP_SIZE == 64 ? i : i >> 1 & 1; }
DEV u32 head_of(u32 slot) { return FragLayout::c_row(WARP_SIZE == 64 ? slot : slot * 2); }

// Absorbed queries and query projection, as in the arguments of the kernel.
struct MlaQuerySource {
    const half_t *absorbed_q, *q;
    u32 heads, query, q_stride;
};
// One MMA A fragment of queries; each 32-bit word has two adjacent channels of one head.
struct QueryFragment { u32 v[FragLayout::NA / 2]; };
// Queries of a warp as MMA fragments: 16 heads of one token, for the channels over which the warp computes
// scores.
struct HeadQueryFragments { QueryFragment v[PRODUCTS]; };
// Online softmax state (maximum, sum) and accumulated outputs of a lane's queries.
struct SoftmaxState {
    float max[SLOTS], sum[SLOTS];  // sum of probabilities: of this lane's own keys until finish()
    FragC out[OWN];
};

// Loads the queries of this warp's token and 16 heads; zeros for heads and tokens that do not exist.
DEV HeadQueryFragments load_queries(const MlaQuerySource& s, const SplitCursor& p) {
    HeadQueryFragments all;
    UNROLL for (u32 i = 0; i < FragLayout::NA; i += 2) {
        const u32 head = first_head() + FragLayout::a_row(i);
        const bool valid = head < s.heads && own_token() < p.count;
        const u64 token = p.token + own_token();
        const half_t* absorbed_q = s.absorbed_q + (token * s.heads + head) * KV_LORA_RANK;
        const half_t* rope_q = s.q + token * s.q_stride + (head + 1) * s.query - QK_ROPE_HEAD_DIM;
        UNROLL for (u32 j = 0; j < PRODUCTS; ++j) {
            const u32 k = (half_of_warp() * PRODUCTS + j) * 16 + FragLayout::a_k(i);
            const half_t* from = k < KV_LORA_RANK ? absorbed_q + k : rope_q + (k - KV_LORA_RANK);
            all.v[j].v[i / 2] = valid ? bits_as<u32>(*(const half_x2*)from) : 0;
        }
    }
    return all;
}

DEV void start(SoftmaxState& r) {
    UNROLL for (u32 i = 0; i < SLOTS; ++i) {
        r.max[i] = NO_SCORE;
        r.sum[i] = 0.f;
    }
    UNROLL for (u32 i = 0; i < OWN; ++i) r.out[i] = zero_c();
}

// Returns the scores of the 16 KV rows of this warp. They are complete only on warps with half_of_warp() ==
// 0, which add the scores of the other channels. Two accumulators are used, because successive MMAs on one
// accumulator would wait for each other.
DEV FragC score(const HeadQueryFragments& q, const half_t* step) {
    const half_t* rows = step + tile_of_warp() * TILE * LINE + half_of_warp() * PRODUCTS * 16;
    FragC even = zero_c(), odd = zero_c();
    UNROLL for (u32 j = 0; j < PRODUCTS; ++j)
        mma16(j & 1 ? odd : even, bits_as<FragA>(q.v[j]), load_b(rows + j * 16, LINE));
    UNROLL for (u32 i = 0; i < FragLayout::NC; ++i) even.x[i] += odd.x[i];
    if (HALVES == 1) return even;
    SHARED(float, parts, TOKENS_PER_BLOCK * KEYS * 16);
    float* part = parts + (own_token() * TILES + tile_of_warp()) * TILE * 16 + lane();
    if (half_of_warp() == 1) UNROLL for (u32 i = 0; i < FragLayout::NC; ++i) part[i * WARP_SIZE] = even.x[i];
    team_sync();
    if (half_of_warp() == 0) UNROLL for (u32 i = 0; i < FragLayout::NC; ++i) even.x[i] += part[i * WARP_SIZE];
    return even;
}

// Returns the shared memory array for the probabilities of a step, through which the warps of a token
// exchange them.
DEV half_t* step_weights() {
    SHARED(half_x8, weights, TOKENS_PER_BLOCK * 16 * WEIGHTS / 8);
    return (half_t*)weights + own_token() * 16 * WEIGHTS;
}

// Updates the maximum score of each head over all warps of the token. `rescale`: output, the factor per head
// by which the sums and outputs of earlier steps must be multiplied. Returns whether any maximum has grown.
DEV bool update_max(SoftmaxState& r, const FragC& s, float* rescale) {
    SHARED(float, all_maxima, TOKENS_PER_BLOCK * TILES * 16);
    float* maxima = all_maxima + own_token() * TILES * 16;
    UNROLL for (u32 slot = 0; slot < SLOTS; ++slot) {
        float high = NO_SCORE;
        UNROLL for (u32 i = 0; i < FragLayout::NC; ++i) high = slot_of(i) == slot ? fmax_(high, s.x[i]) : high;
        high = group_max<SHARERS>(high);
        if (half_of_warp() == 0 && lane() % SHARERS == 0) maxima[tile_of_warp() * 16 + head_of(slot)] = high;
    }
    team_sync();
    bool grows = false;
    UNROLL for (u32 slot = 0; slot < SLOTS; ++slot) {
        float max = r.max[slot];
        UNROLL for (u32 i = 0; i < TILES; ++i) max = fmax_(max, maxima[i * 16 + head_of(slot)]);
        grows |= max > r.max[slot];
        rescale[slot] = exp2_(r.max[slot] - max);
        r.max[slot] = max;
    }
    return grows;
}

// Replaces scores by probabilities and writes them to step_weights(). The step begins at key `at`; the token
// attends to its first `seen` rows. `factor`: softmax scale * log2(e).
DEV void online_softmax(SoftmaxState& r, FragC s, u32 at, u32 seen, float factor) {
    UNROLL for (u32 i = 0; i < FragLayout::NC; ++i) {
        const u32 key = tile_of_warp() * TILE + FragLayout::c_col(i);
        const bool visible = key < seen && (FIRST_POSITION == 0 || at + key >= FIRST_POSITION);
        s.x[i] = visible ? s.x[i] * factor : NO_SCORE;
    }
    float rescale[SLOTS];
    const bool grows = update_max(r, s, rescale);
    UNROLL for (u32 slot = 0; slot < SLOTS; ++slot) r.sum[slot] *= rescale[slot];
    half_t* weights = step_weights();
    if (half_of_warp() == 0) UNROLL for (u32 i = 0; i < FragLayout::NC; ++i) {
        const float p = exp2_(s.x[i] - r.max[slot_of(i)]);
        r.sum[slot_of(i)] += p;
        weights[FragLayout::c_row(i) * WEIGHTS + tile_of_warp() * TILE + FragLayout::c_col(i)] = to_half(p);
    }
    if (warp_any(grows))
        UNROLL for (u32 j = 0; j < OWN; ++j)
            UNROLL for (u32 i = 0; i < FragLayout::NC; ++i) r.out[j].x[i] *= rescale[slot_of(i)];
    team_sync();
}

// Adds to the outputs the products of probabilities and KV rows of the step, for the output channels of this
// warp.
DEV void add_compressed_kv(SoftmaxState& r, const half_t* step) {
    UNROLL for (u32 k = 0; k < TILES; ++k) {
        const FragA a = load_a(step_weights() + k * TILE, WEIGHTS);
        const half_t* rows = step + k * TILE * LINE + warp_of_token() * OWN * 16;
        UNROLL for (u32 j = 0; j < OWN; ++j) mma16(r.out[j], a, load_b_trans(rows + j * 16, LINE));
    }
}

// Computes the total sum of probabilities of each head over all lanes and warps of the token; the sums of the
// 16-key tiles are added in ascending order.
DEV void finish(SoftmaxState& r) {
    SHARED(float, all_sums, TOKENS_PER_BLOCK * TILES * 16);
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
    team_sync();  // A next split without steps has no other barrier before it overwrites all_sums.
}
