// attention_decode/ring.h - loads tiles of 16 keys and values from the KV pool. Each warp has its own ring
// buffer in shared memory, filled by cp.async up to TILES_AHEAD tiles ahead. Warps of 64 lanes load into
// registers, one tile ahead (register_tiles.h).
#pragma once

enum : u32 { TILE_VALUES = TILE_KEYS * D };  // elements of a key tile or a value tile

#if WARP_SIZE == 32
enum : u32 {
    RING_BYTES = WARPS * TILES_AHEAD * 2 * TILE_VALUES * sizeof(KV),
    WIDTH = 16 / sizeof(KV),  // elements per 16-byte copy
    PIECES = D / WIDTH        // copies per row
};

// Ring buffer of one warp in shared memory: KV tiles, and the index of the stage that is filled or read next.
struct KvTileRing {
    KV* tiles;
    u32 stage;
};

DEV KvTileRing ring_of_warp(KV* shared) { return KvTileRing{shared + warp_id() * TILES_AHEAD * 2 * TILE_VALUES, 0}; }

// Returns the swizzled offset, in elements, of a channel of a key or value (row) in a tile. The 16-byte
// vectors of a row are permuted, so that a warp has no bank conflicts when it reads one vector of each of
// eight rows, or half of the vectors of each of two rows.
DEV u32 swizzled_offset(u32 row, u32 channel) {
    const u32 swizzle = ((row & 1) << 2 | (row & 2) | (row >> 2 & 1)) & (PIECES - 1);
    return row * D + (channel / WIDTH ^ swizzle) * WIDTH + channel % WIDTH;
}

// Keys and values are read once per step: the L2 cache policy evict_first prevents them from evicting the
// partial results of splits. An fp8 pool does not use the policy, because ptxas 13.0 assigns registers that
// these copies cannot encode together with it (illegal instruction).
DEV void copy_once(KV* to, const KV* from) {
#if DEV_NV && !KV_FP8
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                 : : "r"(shared_address(to)), "l"(from), "l"(policy) : "memory");
#else
    cp_async16(to, from);
#endif
}

// Starts the copies of the KV tile at `keys` into the current stage, and advances to the next stage. If
// `keys` is null, nothing is copied. Every lane of the warp must call it.
DEV void fetch(KvTileRing& ring, const KV* keys) {
    KV* to = ring.tiles + ring.stage * 2 * TILE_VALUES;
    if (keys != nullptr)
        UNROLL for (u32 i = 0; i < TILE_KEYS * PIECES / WARP_SIZE; ++i) {
            const u32 piece = i * WARP_SIZE + lane(), row = piece / PIECES, channel = piece % PIECES * WIDTH;
            const KV* from = keys + row * D + channel;
            copy_once(to + swizzled_offset(row, channel), from);
            copy_once(to + TILE_VALUES + swizzled_offset(row, channel), from + BLOCK_TOKENS * D);
        }
    cp_async_commit();
    ring.stage = ring.stage + 1 == TILES_AHEAD ? 0 : ring.stage + 1;
}

#if KEYS_FIRST
// Operands with the values of channels [16 j, 16 j + 32) of a tile.
struct ValueOperandPair { u32x4 v[2]; };
#  if KV_FP8
// Loads values by ldmatrix.trans, which transposes 16-bit elements, here pairs of fp8 channels: each resulting
// 32-bit word has two channels of two keys.
DEV ValueOperandPair stored_pair(const KV* tile, u32 j) {
    ValueOperandPair v;
    u32x4 words;
#    if DEV_NV
    const KV* row = tile + swizzled_offset((lane() & 7) + (lane() >> 4) * 8, j * 16 + (lane() & 8) * 2);
    words = bits_as<u32x4>(ldmatrix_trans((const half_t*)row));
#    else
    for (u32 i = 0; i < 4; ++i) {
        const u32 key = (lane() & 3) * 2 + i / 2 * 8, channel = (j + i % 2) * 16 + channel_of(0);
        const KV *low = tile + swizzled_offset(key, channel), *high = tile + swizzled_offset(key + 1, channel);
        words.v[i] = (u32)low[0].bits | (u32)low[1].bits << 8 | (u32)high[0].bits << 16 | (u32)high[1].bits << 24;
    }
#    endif
    UNROLL for (u32 i = 0; i < 4; ++i)
        transpose_pairs(words.v[i], v.v[i % 2].v[i / 2 * 2], v.v[i % 2].v[i / 2 * 2 + 1]);
    return v;
}
#  else
DEV ValueOperandPair stored_pair(const KV* tile, u32 j) {
    ValueOperandPair v;
    UNROLL for (u32 h = 0; h < 2; ++h) {
#    if DEV_NV
        v.v[h] = bits_as<u32x4>(ldmatrix_trans(tile + swizzled_offset((lane() & 7) + (lane() >> 4) * 8, (j + h) * 16 + (lane() & 8))));
#    else
        for (u32 i = 0; i < 4; ++i) {
            const u32 key = (lane() & 3) * 2 + i / 2 * 8, channel = (j + h) * 16 + channel_of(i % 2);
            v.v[h].v[i] = tile[swizzled_offset(key, channel)].bits | (u32)tile[swizzled_offset(key + 1, channel)].bits << 16;
        }
#    endif
    }
    return v;
}
#  endif

DEV ValueOperand stored_values(const KV* tile) {
    ValueOperand v;
    UNROLL for (u32 j = 0; j < D / 16; j += 2) {
        const ValueOperandPair pair = stored_pair(tile, j);
        UNROLL for (u32 h = 0; h < 2; ++h) v.v[j + h] = pair.v[h];
    }
    return v;
}

// Returns the mask of word `i` of an operand for the keys before index `present` of the tile.
DEV u32 present_keys(u32 i, u32 present) {
    const u32 key = (lane() & 3) * 2 + i / 2 * 8;
    return (key < present ? 0xffffu : 0) | (key + 1 < present ? 0xffff0000u : 0);
}

DEV ValueOperand values_of(const KV* tile, u32 present) {
    ValueOperand v = stored_values(tile);
    if (present >= TILE_KEYS) return v;
    UNROLL for (u32 i = 0; i < 4; ++i) {
        const u32 mask = present_keys(i, present);
        UNROLL for (u32 j = 0; j < D / 16; ++j) v.v[j].v[i] &= mask;
    }
    return v;
}
#else
DEV ValueOperand values_of(const KV* tile, u32 present) {
    ValueOperand v;
    UNROLL for (u32 i = 0; i < KEYS; ++i) {
        const u32 key = key_of(i);
        UNROLL for (u32 h = 0; h < D / 64; ++h)
            v.v[i][h] = key < present ? load_kv8(tile + swizzled_offset(key, h * 64 + (lane() >> 2) * 8)) : zero8();
    }
    return v;
}
#endif

// Waits until the copies of the oldest tile in the ring buffer have completed. Every lane of the warp must
// call it.
DEV void await_tile() {
    cp_async_wait<TILES_AHEAD - 1>();
    warp_sync();
}

DEV KeyOperand stored_keys(const KvTileRing& ring) {
    const KV* keys = ring.tiles + ring.stage * 2 * TILE_VALUES;
    KeyOperand k;
    UNROLL for (u32 j = 0; j < KEY_ROWS; ++j)
        UNROLL for (u32 i = 0; i < D / 32; ++i) k.v[j][i] = load_kv8(keys + swizzled_offset(key_row(j), i * 32 + strip_k()));
    return k;
}

// Loads the oldest tile of the ring buffer into registers; its stage may be refilled afterwards. Values of
// keys from index `present` on, which are beyond the context, are replaced by zero, because freed KV blocks
// may contain NaN.
DEV void load_tile(const KvTileRing& ring, u32 present, KeyOperand& k, ValueOperand& v) {
    k = stored_keys(ring);
    v = values_of(ring.tiles + ring.stage * 2 * TILE_VALUES + TILE_VALUES, present);
    warp_sync();  // The next copy overwrites this stage.
}

#if LATE_VALUES
// Adds the products of the probabilities and the values of the oldest tile to the outputs r.out, as load_tile() and
// add_values() do; its stage may be refilled afterwards.
DEV void add_stored_values(SoftmaxState& r, const ScoreFragment& p, const KvTileRing& ring, u32 present) {
    const KV* tile = ring.tiles + ring.stage * 2 * TILE_VALUES + TILE_VALUES;
    const ProbabilityWords b = probability_words(p);
    UNROLL for (u32 j = 0; j < D / 16; j += 2) {
        ValueOperandPair pair = stored_pair(tile, j);
        if (present < TILE_KEYS)
            UNROLL for (u32 i = 0; i < 4; ++i)
                UNROLL for (u32 h = 0; h < 2; ++h) pair.v[h].v[i] &= present_keys(i, present);
        UNROLL for (u32 h = 0; h < 2; ++h) mma_values(r.out[j + h], pair.v[h], b.v[0], b.v[1]);
    }
    warp_sync();  // The next copy overwrites this stage.
}
#endif
#else
#  include "attention_decode/register_tiles.h"
#endif
