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
    // Row stride of probabilities in shared memory, in elements: without bank conflicts, as LINE.
    WEIGHTS = KEYS + (WARP_SIZE == 64 ? 16 : 8)
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
struct QueryPair { QueryFragment v[2]; };
// Queries of a warp as MMA fragments: 16 heads of one token, for the channels over which the warp computes
// scores.
struct HeadQueryFragments { QueryFragment v[PRODUCTS]; };
// Online softmax state (maximum, sum) and accumulated outputs of a lane's queries.
struct SoftmaxState {
    float max[SLOTS], sum[SLOTS];  // sum of probabilities: of this lane's own keys until finish()
    FragC out[OWN];
};

// Returns the channel of element i of product j of this warp. With 64 lanes, a lane has eight successive channels of two products, so
// that it loads 16 bytes of a key.
DEV u32 query_channel(u32 j, u32 i) {
#if WARP_SIZE == 64
    if (j < PRODUCTS / 2 * 2) return (half_of_warp() * PRODUCTS + j / 2 * 2) * 16 + (lane() >> 4) * 8 + j % 2 * 4 + i;
#endif
    return (half_of_warp() * PRODUCTS + j) * 16 + FragLayout::a_k(i);
}

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
            const u32 k = query_channel(j, i);
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
    FragC even = zero_c(), odd = zero_c();
#if WARP_SIZE == 64
    const half_t* rows = step + tile_of_warp() * TILE * LINE;
    struct KeyPair { FragB v[2]; };
    UNROLL for (u32 j = 0; j + 2 <= PRODUCTS; j += 2) {
        const u32x4 key = load_piece(rows + FragLayout::b_col(0) * LINE + query_channel(j, 0));
#  if DEV_GFX >= 0x950
        f32x4 sum = bits_as<f32x4>(j & 2 ? odd : even);
        strip_mma(sum, StripOperandA{{bits_as<half_x8>(QueryPair{{q.v[j], q.v[j + 1]}})}}, bits_as<half_x8>(key));
        (j & 2 ? odd : even) = bits_as<FragC>(sum);
#  else
        const KeyPair pair = bits_as<KeyPair>(key);
        mma16(even, bits_as<FragA>(q.v[j]), pair.v[0]);
        mma16(odd, bits_as<FragA>(q.v[j + 1]), pair.v[1]);
#  endif
    }
    if (PRODUCTS % 2 != 0)
        mma16(even, bits_as<FragA>(q.v[PRODUCTS - 1]), load_b(rows + (half_of_warp() * PRODUCTS + PRODUCTS - 1) * 16, LINE));
#else
    const half_t* rows = step + tile_of_warp() * TILE * LINE + half_of_warp() * PRODUCTS * 16;
    UNROLL for (u32 j = 0; j < PRODUCTS; ++j)
        mma16(j & 1 ? odd : even, bits_as<FragA>(q.v[j]), load_b(rows + j * 16, LINE));
#endif
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

// Returns the position of a key of tile `tile` among the probabilities of a step. With 64 lanes, the eight probabilities that a lane
// multiplies are successive: those of keys n, n + 4, n + 8, n + 12 of both tiles, where n is 0, 2, 1, 3 for the four groups of lanes.
// Two groups then read values of keys that are two rows apart, which are in different banks.
DEV u32 weight_position(u32 tile, u32 key) {
    return WARP_SIZE == 64 ? (key % 4 / 2 + key % 2 * 2) * 8 + tile * 4 + key / 4 : tile * TILE + key;
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
        weights[FragLayout::c_row(i) * WEIGHTS + weight_position(tile_of_warp(), FragLayout::c_col(i))] = to_half(p);
    }
    if (warp_any(grows))
        UNROLL for (u32 j = 0; j < OWN; ++j)
            UNROLL for (u32 i = 0; i < FragLayout::NC; ++i) r.out[j].x[i] *= rescale[slot_of(i)];
    team_sync();
}

// Adds to the outputs the products of probabilities and KV rows of the step, for the output channels of this
// warp.
#if WARP_SIZE == 64
static_assert(TILES == 2 && OWN % 2 == 0, "a lane multiplies two tiles of keys, and two of channels");
// Returns the output channel, among those of the warp, of column `column` of accumulator j: a lane loads two successive channels of
// a key, for two accumulators.
DEV u32 output_channel(u32 j, u32 column) { return j / 2 * 32 + column * 2 + j % 2; }

DEV void add_compressed_kv(SoftmaxState& r, const half_t* step) {
    const u32 group = lane() >> 4, first_key = group % 2 * 2 + group / 2;
    const StripOperandA a{{bits_as<half_x8>(load_piece(step_weights() + strip_x_row(0) * WEIGHTS + group * 8))}};
    const half_t* rows = step + first_key * LINE + warp_of_token() * OWN * 16 + output_channel(0, lane() & 15);
    UNROLL for (u32 j = 0; j < OWN; j += 2) {
        u32x4 channels[2];
        UNROLL for (u32 i = 0; i < 4; ++i) {
            const half_t* low = rows + (i / 2 * TILE + i % 2 * 8) * LINE + j * 16;
            const u32 first = *(const u32*)low, second = *(const u32*)(low + 4 * LINE);
            channels[0].v[i] = (first & 0xffff) | second << 16;
            channels[1].v[i] = first >> 16 | (second & 0xffff0000u);
        }
        UNROLL for (u32 c = 0; c < 2; ++c) {
            f32x4 sum = bits_as<f32x4>(r.out[j + c]);
            strip_mma(sum, a, bits_as<half_x8>(channels[c]));
            r.out[j + c] = bits_as<FragC>(sum);
        }
    }
}
#else
DEV void add_compressed_kv(SoftmaxState& r, const half_t* step) {
    UNROLL for (u32 k = 0; k < TILES; ++k) {
        const FragA a = load_a(step_weights() + k * TILE, WEIGHTS);
        const half_t* rows = step + k * TILE * LINE + warp_of_token() * OWN * 16;
        UNROLL for (u32 j = 0; j < OWN; ++j) mma16(r.out[j], a, load_b_trans(rows + j * 16, LINE));
    }
}
#endif

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
