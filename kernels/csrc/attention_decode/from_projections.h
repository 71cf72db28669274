// attention_decode/from_projections.h - source of queries and keys: the queries, and the key and value of the
// row's own token, are read from the output of the QKV projection. q/k norm and RoPE run in the lanes that
// multiply. The warp whose tile contains the own token writes the token's key and value to the pool. The
// results have the same bits as those of the kernel qk_norm_rope_kv_write, whose launch and round trip
// through memory are saved.
//
// If the MMA has a free row (fewer than 8 queries per KV head), norm and RoPE process the own key as an
// additional query.
//
// A lane's pieces of a head are channels i * 32 + strip_k() .. + 8; RoPE pairs channel p with p + D / 2,
// which is in piece i + D / 64 of the same lane. The own key is in shared memory until the warp takes the
// tile that contains it; the tile's other keys are from earlier steps, so the ring may prefetch every tile
// before the previous kernel has ended.
#pragma once
#include "norm/norm.h"
#include "qk_rope/rotate.h"

enum : u32 {
    HALF_PIECES = D / 64,
    OWN_PIECES = 2 * D / 8,
    KEY_AS_QUERY = HEAD_GROUP < 8,            // norm and RoPE process the own key as an additional query
    KEY_ROW = KEY_AS_QUERY ? HEAD_GROUP : 0,  // row of the MMA operand that has the own key
};

// Source of queries and new keys: the QKV projection, to which norm and RoPE are applied here.
struct QueryKeySource {
    // qkv [tokens, (query heads + 2 KV heads) * D]; norm weights [D], or both null: no norm
    const half_t *qkv, *q_norm, *k_norm;
    const float *cos, *sin;             // [positions, D / 2], for RoPE
    const i64* slots;                   // [tokens] KV slot of each token; negative: not stored
    KV* pool;
    u32 kv_heads, stride;
    float eps;
};

struct RotaryAngles { f32x8 cos[HALF_PIECES], sin[HALF_PIECES]; };

// Returns the shared memory with the key, then the value, of the row's own token.
DEV KV* own_token() { SHARED(half_x8, own, OWN_PIECES); return (KV*)own; }

DEV bool has_new_keys(u32, const SplitCursor&, const BatchMetadata&) { return false; }

DEV RotaryAngles load_angles(const QueryKeySource& source, u32 position) {
    RotaryAngles angles;
    const u64 row = (u64)position * (D / 2);
    UNROLL for (u32 i = 0; i < HALF_PIECES; ++i) {
        angles.cos[i] = load8(source.cos + row + i * 32 + strip_k());
        angles.sin[i] = load8(source.sin + row + i * 32 + strip_k());
    }
    return angles;
}

// Sum of squares in the order of qk_rope.h: runs of 4 low and 4 high channels, then a tree over the runs.
DEV float squares_of(const f32x8* x) {
    float sum = 0.f;
    UNROLL for (u32 i = 0; i < HALF_PIECES; ++i) {
        float runs[2] = {0.f, 0.f};
        UNROLL for (u32 r = 0; r < 2; ++r) {
            UNROLL for (u32 j = r * 4; j < r * 4 + 4; ++j) runs[r] = fma_(x[i].v[j], x[i].v[j], runs[r]);
            UNROLL for (u32 j = r * 4; j < r * 4 + 4; ++j)
                runs[r] = fma_(x[i + HALF_PIECES].v[j], x[i + HALF_PIECES].v[j], runs[r]);
        }
        const float tree = group_sum<4>(runs[0] + runs[1]);
        sum = i == 0 ? tree : sum + tree;
    }
    return sum;
}

// Computes rope(norm(head)) of the head of each group of 4 lanes. `norm` is null on all lanes or on none.
// Every lane must call it.
DEV void norm_and_rope(QueryOperand& head, const half_t* norm, const RotaryAngles& angles, float eps) {
    f32x8 x[2 * HALF_PIECES];
    UNROLL for (u32 i = 0; i < 2 * HALF_PIECES; ++i) x[i] = widen(head.v[i]);
    if (norm != nullptr) {
        f32x8 w[2 * HALF_PIECES];
        UNROLL for (u32 i = 0; i < 2 * HALF_PIECES; ++i) w[i] = load8(norm + i * 32 + strip_k());
        const float scale = inverse_rms(squares_of(x), D, eps);
        UNROLL for (u32 i = 0; i < 2 * HALF_PIECES; ++i)
            UNROLL for (u32 j = 0; j < 8; ++j) x[i].v[j] = f32(to_half(normed(x[i].v[j], scale, w[i].v[j])));
    }
    UNROLL for (u32 i = 0; i < HALF_PIECES; ++i)
        UNROLL for (u32 j = 0; j < 8; ++j) {
            const float a = x[i].v[j], b = x[i + HALF_PIECES].v[j], c = angles.cos[i].v[j], s = angles.sin[i].v[j];
            x[i].v[j] = rotated_low(a, b, c, s);
            x[i + HALF_PIECES].v[j] = rotated_high(a, b, c, s);
        }
    UNROLL for (u32 i = 0; i < 2 * HALF_PIECES; ++i) head.v[i] = narrow(x[i]);
}

// Whether this warp takes the tile of the row's own token in this split.
DEV bool has_own_tile(const SplitCursor& p) {
    if (p.context == 0 || p.split + 1 != p.splits) return false;
    return (p.context - 1 - first_key(p)) / TILE_KEYS % WARPS == warp_id();
}

// Writes the own key, which the lanes of KEY_ROW have, and the own value to shared memory, for
// complete_tile(), and to the pool.
DEV void store_own_kv(const QueryKeySource& source, const SplitCursor& p, const QueryOperand& key, const half_x8& value,
                      i64 slot) {
    KV* own = own_token();
    const u64 block = (u64)slot / BLOCK_TOKENS, row = (u64)slot % BLOCK_TOKENS;
    KV* to = source.pool + ((block * source.kv_heads + p.head) * 2 * BLOCK_TOKENS + row) * D;
    if (strip_w_row() == KEY_ROW)
        UNROLL for (u32 i = 0; i < 2 * HALF_PIECES; ++i) {
            *(half_x8*)(own + i * 32 + strip_k()) = key.v[i];
            if (slot >= 0) *(half_x8*)(to + i * 32 + strip_k()) = key.v[i];
        }
    if (lane() < D / 8) {
        *(half_x8*)(own + D + lane() * 8) = value;
        if (slot >= 0) *(half_x8*)(to + BLOCK_TOKENS * D + lane() * 8) = value;
    }
}

DEV void begin_split(const QueryKeySource& source, QueryOperand& mine, const SplitCursor& p, bool new_head) {
    const bool own = has_own_tile(p);
    if (!new_head && !own) return;
    const half_t* row = source.qkv + (u64)p.token * source.stride;
    const half_t *queries = row + p.head * HEAD_GROUP * D, *key_head = row + (source.kv_heads * HEAD_GROUP + p.head) * D;
    // Issue all loads before the first use.
    const RotaryAngles angles = load_angles(source, p.position);
    mine = load_queries([&](u32 query) {
        if (KEY_AS_QUERY && own && query == KEY_ROW) return key_head;
        return query < HEAD_GROUP ? queries + query * D : (const half_t*)nullptr;
    });
    QueryOperand key{};
    half_x8 value{};
    i64 slot = -1;
    if (own) {
        if (!KEY_AS_QUERY) key = load_queries([&](u32) { return key_head; });
        if (lane() < D / 8) value = *(const half_x8*)(key_head + source.kv_heads * D + lane() * 8);
        slot = source.slots[p.token];
    }
    norm_and_rope(mine, KEY_AS_QUERY && strip_w_row() == KEY_ROW ? source.k_norm : source.q_norm, angles, source.eps);
    if (!own) return;
    if (KEY_AS_QUERY)
        key = mine;
    else
        norm_and_rope(key, source.k_norm, angles, source.eps);
    store_own_kv(source, p, key, value, slot);
    if (KEY_AS_QUERY && strip_w_row() >= HEAD_GROUP) mine = QueryOperand{};
}

// Called when the tile at key `at` has arrived: writes the own token into the tile that contains its
// position. Every lane must call it.
DEV void complete_tile(const QueryKeySource&, const KvTileRing& ring, const SplitCursor& p, u32 at) {
    if (at + TILE_KEYS < p.context) return;
    KV* tile = ring.tiles + ring.stage * 2 * TILE_VALUES + lane() / (D / 8) * TILE_VALUES;
    if (lane() < OWN_PIECES)
        *(half_x8*)(tile + swizzled_offset(p.context - 1 - at, lane() % (D / 8) * 8)) = *(const half_x8*)(own_token() + lane() * 8);
    warp_sync();
}
