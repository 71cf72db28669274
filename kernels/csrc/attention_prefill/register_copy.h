// attention_prefill/register_copy.h - copies keys and values with warps of 64 lanes: the keys and values of a
// step are loaded into registers while the previous step is multiplied. Block-table entries are loaded two
// steps ahead.
#pragma once
#include "dev/register_copy.h"

enum : u32 {
    WIDTH = 16 / sizeof(KV),
    PIECES = D / WIDTH,               // pieces per key
    OWN = STEP * PIECES / 256         // keys per thread and step, and as many values
};
static_assert(OWN * 256 == STEP * PIECES && 256 % PIECES == 0, "threads copy different numbers of pieces");

// Keys and values of one step that a thread has loaded into registers and will store to shared memory.
struct KvCopy {
    u32 block[OWN];                   // block-table entries of the step after the loaded one
    u32x4 key[OWN], value[OWN];
};

DEV u32 copied_key(u32 p) { return (tid() + p * 256) / PIECES; }
DEV u32 copied_channel() { return tid() % PIECES * WIDTH; }

// Loads the block-table entries of keys [at, at + STEP). For keys that are not present, the entry of the first
// present key is loaded instead.
DEV void load_blocks(KvCopy& copy, const RowKvSource& row, u32 at) {
    UNROLL for (u32 p = 0; p < OWN; ++p) {
        const u32 position = at + copied_key(p);
        copy.block[p] = (u32)row.table[(is_present(row, position) ? position : first_key(row)) / BLOCK_TOKENS];
    }
}

// Loads the keys and values of positions [at, at + STEP) into registers; load_blocks() has already loaded
// their block-table entries.
DEV void load_keys_and_values(KvCopy& copy, const KV* pool, const RowKvSource& row, u32 at) {
    UNROLL for (u32 p = 0; p < OWN; ++p) {
        const u64 head = ((u64)copy.block[p] * row.kv_heads + row.head) * 2 * BLOCK_TOKENS;
        const KV* from = pool + (head + (at + copied_key(p)) % BLOCK_TOKENS) * D + copied_channel();
        copy.key[p] = load_piece(from);
        copy.value[p] = load_piece(from + BLOCK_TOKENS * D);
    }
}

// Stores the keys and values of positions [at, at + STEP) from registers to shared memory. Positions that are not
// present are zero-filled.
DEV void store_keys_and_values(KV* stage, const KvCopy& copy, const RowKvSource& row, u32 at) {
    UNROLL for (u32 p = 0; p < OWN; ++p) {
        const u32 key = copied_key(p);
        const bool present = is_present(row, at + key);
        store_loaded(stage + key * K_STRIDE + copied_channel(), copy.key[p], present);
        store_loaded(stage + STEP * K_STRIDE + key * V_STRIDE + copied_channel(), copy.value[p], present);
    }
}

// Copies the keys before `end` to `stage` in steps of STEP keys, and calls multiply(stage, first key) for each step.
// Every thread of the block must call it.
template <class Multiply>
DEV void copy_and_multiply(KV* stage, const KV* pool, const RowKvSource& row, u32 end, const Multiply& multiply) {
    KvCopy copy;
    const u32 begin = first_step(row);
    load_blocks(copy, row, begin);
    load_keys_and_values(copy, pool, row, begin);
    keep_load_order();
    load_blocks(copy, row, begin + STEP);
    keep_load_order();
    for (u32 at = begin; at < end; at += STEP) {
        store_keys_and_values(stage, copy, row, at);
        load_keys_and_values(copy, pool, row, at + STEP);
        keep_load_order();
        load_blocks(copy, row, at + 2 * STEP);
        sync();
        multiply(stage, at);
        sync();
    }
}
