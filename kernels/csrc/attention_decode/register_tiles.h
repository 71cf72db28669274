// attention_decode/register_tiles.h - with warps of 64 lanes the registers are the pipeline's buffer. The keys of the
// next tile are loaded when the keys of the current tile have been multiplied, and the values likewise: a whole tile is
// in flight at every wait. No load depends on a branch, because on AMD a branch ends with a wait for the loads inside
// it.
#pragma once
#include "dev/register_copy.h"
#include "dev/scalar.h"

enum : u32 {
    RING_BYTES = 0,
    KEY_WORDS = 8 * sizeof(KV) / 4,      // 32-bit words of eight channels of a key
    VALUE_WORDS = PART * sizeof(KV) / 4, // 32-bit words of a lane's channels of a value
    // Whether each value is replaced by one of the next tile when it has been read, instead of after the multiplication of
    // the tile: loaded and read values then need registers at the same time, which fp8 values need anyway.
    REPLACES_VALUES = VALUE_WORDS <= (KV_FP8 ? 4 : 2)
};

// 32-bit words that a lane has loaded: 1, 2 or 4, or several vectors of 4.
template <u32 WORDS> struct LoadedWords { u32 v[WORDS]; };
template <u32 WORDS> struct LoadedWordHalves { LoadedWords<WORDS / 2> v[2]; };

template <u32 WORDS> DEV LoadedWords<WORDS> load_words(const void* p) {
#if DEV_AMD
    if constexpr (WORDS <= 4) return bits_as<LoadedWords<WORDS>>(*(const typename DevWords<WORDS * 4>::type*)p);
    else return bits_as<LoadedWords<WORDS>>(LoadedWordHalves<WORDS>{{load_words<WORDS / 2>(p), load_words<WORDS / 2>((const u8*)p + WORDS * 2)}});
#else
    LoadedWords<WORDS> words;
    UNROLL for (u32 i = 0; i < WORDS; ++i) words.v[i] = ((const u32*)p)[i];
    return words;
#endif
}

// Returns the words. The compiler cannot move uses of the result, or the wait for the load, to a point before this
// call, and keeps the words in successive registers.
template <u32 WORDS> DEV LoadedWords<WORDS> pinned(const LoadedWords<WORDS>& words) {
#if DEV_AMD
    if constexpr (WORDS <= 4) {
        auto v = __builtin_bit_cast(typename DevWords<WORDS * 4>::type, words);
        asm volatile("" : "+v"(v));
        return bits_as<LoadedWords<WORDS>>(v);
    } else {
        const LoadedWordHalves<WORDS> halves = bits_as<LoadedWordHalves<WORDS>>(words);
        return bits_as<LoadedWords<WORDS>>(LoadedWordHalves<WORDS>{{pinned(halves.v[0]), pinned(halves.v[1])}});
    }
#else
    return words;
#endif
}

// Keeps each vector of the queries in successive registers. Otherwise they would be composed anew for each split.
DEV void pin(QueryOperand& q) {
    UNROLL for (u32 i = 0; i < QUERY_PARTS; ++i)
        q.v[i].v[0] = bits_as<half_x8>(pinned(bits_as<LoadedWords<4>>(q.v[i].v[0])));
}

// Keys and values of a tile in registers, as they are in the KV pool.
struct KvTileRing {
    LoadedWords<KEY_WORDS> key[QUERY_PARTS];
    LoadedWords<VALUE_WORDS> value[KEYS];
};

DEV KvTileRing ring_of_warp(KV*) { return KvTileRing{}; }

// Addresses of the keys and of the values that this lane loads of the tile at `tile`.
DEV const KV* keys_of_lane(const KV* tile) { return tile + key_row(0) * D + strip_k(); }
DEV const KV* values_of_lane(const KV* tile) { return tile + BLOCK_TOKENS * D + key_of(0) * D + (lane() & 15) * PART; }

DEV void fetch_key(KvTileRing& ring, u32 i, const KV* from) {
    ring.key[i] = load_words<KEY_WORDS>(from + i * 32);
    keep_load_order();
}
DEV void fetch_value(KvTileRing& ring, u32 i, const KV* from) {
    ring.value[i] = load_words<VALUE_WORDS>(from + i * D);
    keep_load_order();
}

DEV void fetch_values(KvTileRing& ring, const KV* tile) {
    UNROLL for (u32 i = 0; i < KEYS; ++i) fetch_value(ring, i, values_of_lane(tile));
}

DEV void fetch(KvTileRing& ring, const KV* tile) {
    if (tile == nullptr) return;
    UNROLL for (u32 i = 0; i < QUERY_PARTS; ++i) fetch_key(ring, i, keys_of_lane(tile));
    fetch_values(ring, tile);
}

// Returns the scores of the loaded keys, and loads the keys of the tile at `next`.
DEV ScoreFragment score_loaded(KvTileRing& ring, const QueryOperand& q, const KV* next) {
    f32x4 c{{0.f, 0.f, 0.f, 0.f}};
    UNROLL for (u32 i = 0; i < QUERY_PARTS; ++i) {
#if KV_FP8
        const half_x8 key = widen_half(bits_as<fp8x8>(pinned(ring.key[i])));
#else
        const half_x8 key = bits_as<half_x8>(pinned(ring.key[i]));
#endif
        strip_mma(c, StripOperandA{{key}}, q.v[i].v[0]);
        fetch_key(ring, i, keys_of_lane(next));
    }
    ScoreFragment s;
    UNROLL for (u32 i = 0; i < KEYS; ++i) s.v[0][i] = c.v[i];
    return s;
}

// Returns the loaded values. With REPLACES_VALUES, loads the values of the tile at `next`. Values of keys from index `present` on, which are
// beyond the context, are replaced by zero, because freed KV blocks may contain NaN.
DEV ValueOperand loaded_values(KvTileRing& ring, u32 present, const KV* next) {
    ValueOperand v;
    UNROLL for (u32 i = 0; i < KEYS; ++i) {
        const u32 mask = 0u - (u32)(key_of(i) < present);
        struct ValueChannelRun { half_t v[PART]; };
        const LoadedWords<VALUE_WORDS> loaded = pinned(ring.value[i]);
        LoadedWords<PART / 2> words;
        UNROLL for (u32 w = 0; w < VALUE_WORDS; ++w) {
            const u32 word = loaded.v[w] & mask;
#if KV_FP8
            words.v[2 * w] = pack_exact(unpack_fp8_of<false>(word));
            words.v[2 * w + 1] = pack_exact(unpack_fp8_of<true>(word));
#else
            words.v[w] = word;
#endif
        }
        if (REPLACES_VALUES) {
            words = pinned(words);  // The registers of the loaded words have been read.
            keep_load_order();
            fetch_value(ring, i, values_of_lane(next));
        }
        const ValueChannelRun run = bits_as<ValueChannelRun>(words);
        UNROLL for (u32 j = 0; j < PART; ++j) v.v[i][j] = run.v[j];
    }
    return v;
}
