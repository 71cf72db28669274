// attention_decode/from_projections.h - queries and keys for decode attention with fused q/k norm, RoPE and
// KV write. The query, key and value of the row's token (a decode row has one token) are read from the output
// of the QKV projection; norm and RoPE run in the lanes that later compute the scores. The warp whose tile
// contains the position of this token writes its key and value to the KV pool. Results are bit-identical to
// those of the kernel qk_norm_rope_kv_write, but its launch and its round trip through memory are saved.
//
// If the MMA has an unused query row (fewer than 8 queries per KV head), norm and RoPE process the key of the
// row's token in that row, as an additional query.
//
// A lane has vectors of 8 consecutive channels of a head: vector i has channels i * 32 + strip_k() to i * 32
// + strip_k() + 7. RoPE rotates channel p with p + D / 2, which is in vector i + D / 64 of the same lane. The
// key of the row's token is in shared memory until the warp processes the tile that contains its position.
// The other keys of that tile are from earlier steps, so every tile may be prefetched before the previous
// kernel has ended.
#pragma once
#include "norm/norm.h"
#include "qk_rope/rotate.h"

enum : u32 {
    HALF_PIECES = D / 64,
    OWN_PIECES = 2 * D / 8,
    KEY_AS_QUERY = HEAD_GROUP < 8,            // norm and RoPE process the own key as an additional query
    KEY_ROW = KEY_AS_QUERY ? HEAD_GROUP : 0,  // row of the MMA operand that has the own key
};

// Inputs of norm and RoPE, from which the queries and the key of the row's token are computed.
struct QueryKeySource {
    // qkv [tokens, (query heads + 2 KV heads) * D]; q_norm, k_norm: norm weights [D], or both null if the
    // model has no q/k norm
    const half_t *qkv, *q_norm, *k_norm;
    const float *cos, *sin;             // [positions, D / 2], for RoPE
    const i64* slots;                   // [tokens] KV slot of each token; negative: not stored
    KV* pool;
    u32 kv_heads, stride;
    float eps;
};

struct RotaryAngles { f32x8 cos[HALF_PIECES], sin[HALF_PIECES]; };

// Returns the shared memory that contains the key, then the value, of the row's token.
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

// Returns the sum of squares of a head, added in the same order as in qk_rope.h: first over 4 channels of the
// lower half and the 4 channels that RoPE pairs with them, then as a tree over these groups.
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

// Replaces `head` by rope(norm(head)); each group of 4 lanes has one head. `norm`: norm weights, null on all
// lanes if the model has no q/k norm. Every lane of the warp must call it.
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

// Whether this warp processes the tile that contains the position of the row's token, and that tile is in
// this split.
DEV bool has_own_tile(const SplitCursor& p) {
    if (p.context == 0 || p.split + 1 != p.splits) return false;
    return (p.context - 1 - first_key(p)) / TILE_KEYS % WARPS == warp_id();
}

// Stores 16 bytes of the row's token in the KV pool. Benign race: cp.async copies of the tile that contains the token may still
// read these bytes. complete_tile() replaces the copy before it is used, so ThreadSanitizer does not check the store.
#ifdef __SANITIZE_THREAD__
__attribute__((noinline, no_sanitize_thread))
#endif
DEV void store_in_pool(KV* to, const half_x8& v) { *(half_x8*)to = v; }

// Writes the key and the value of the row's token to the KV pool, and to shared memory, from which
// complete_tile() reads them. The key is in the registers of the lanes of MMA row KEY_ROW.
DEV void store_own_kv(const QueryKeySource& source, const SplitCursor& p, const QueryOperand& key, const half_x8& value,
                      i64 slot) {
    KV* own = own_token();
    const u64 block = (u64)slot / BLOCK_TOKENS, row = (u64)slot % BLOCK_TOKENS;
    KV* to = source.pool + ((block * source.kv_heads + p.head) * 2 * BLOCK_TOKENS + row) * D;
    if (strip_w_row() == KEY_ROW)
        UNROLL for (u32 i = 0; i < 2 * HALF_PIECES; ++i) {
            *(half_x8*)(own + i * 32 + strip_k()) = key.v[i];
            if (slot >= 0) store_in_pool(to + i * 32 + strip_k(), key.v[i]);
        }
    if (lane() < D / 8) {
        *(half_x8*)(own + D + lane() * 8) = value;
        if (slot >= 0) store_in_pool(to + BLOCK_TOKENS * D + lane() * 8, value);
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

// Called when the copies of the tile that begins at key `at` have completed: writes the key and value of the
// row's token into the tile if its position is in this tile. Every lane of the warp must call it.
DEV void complete_tile(const QueryKeySource&, const KvTileRing& ring, const SplitCursor& p, u32 at) {
    if (at + TILE_KEYS < p.context) return;
    KV* tile = ring.tiles + ring.stage * 2 * TILE_VALUES + lane() / (D / 8) * TILE_VALUES;
    if (lane() < OWN_PIECES)
        *(half_x8*)(tile + swizzled_offset(p.context - 1 - at, lane() % (D / 8) * 8)) = *(const half_x8*)(own_token() + lane() * 8);
    warp_sync();
}
