// attention_prefill/register_copy.h - copies keys and values with warps of 64 lanes through registers. As soon as a
// vector of the current step has been stored to shared memory, that of a later step is loaded into its register:
// COUNT vectors of a lane are in flight at every wait. Block-table entries are loaded a step earlier.
#pragma once
#include "dev/register_copy.h"

enum : u32 {
    WIDTH = 16 / sizeof(KV),
    PIECES = D / WIDTH,               // pieces per key
    OWN = STEP * PIECES / 256,        // keys per thread and step, and as many values
    STEPS_AHEAD = OWN >= 4 ? 1 : 2,   // steps in registers
    COUNT = STEPS_AHEAD * OWN * 2
};
static_assert(OWN * 256 == STEP * PIECES && 256 % PIECES == 0, "threads copy different numbers of pieces");

// Block-table entries of the keys of a step that a thread loads.
struct KvBlocks { u32 v[OWN]; };
// Keys and values of one step that a thread has loaded into registers and will store to shared memory.
struct KvCopy { u32x4 key[OWN], value[OWN]; };

DEV u32 copied_key(u32 p) { return (tid() + p * 256) / PIECES; }
DEV u32 copied_channel() { return tid() % PIECES * WIDTH; }

// Loads the block-table entries of keys [at, at + STEP). For keys that are not present, the entry of the first
// present key is loaded instead.
DEV KvBlocks load_blocks(const RowKvSource& row, u32 at) {
    KvBlocks blocks;
    UNROLL for (u32 p = 0; p < OWN; ++p) {
        const u32 position = at + copied_key(p);
        blocks.v[p] = (u32)row.table[(is_present(row, position) ? position : first_key(row)) / BLOCK_TOKENS];
    }
    keep_load_order();
    return blocks;
}

// Loads vector p of the keys and of the values of positions [at, at + STEP), whose block-table entries are
// `blocks`.
DEV void load_key_and_value(KvCopy& copy, u32 p, const KV* pool, const RowKvSource& row, const KvBlocks& blocks,
                            u32 at) {
    const u64 head = ((u64)blocks.v[p] * row.kv_heads + row.head) * 2 * BLOCK_TOKENS;
    const KV* from = pool + (head + (at + copied_key(p)) % BLOCK_TOKENS) * D + copied_channel();
    copy.key[p] = load_piece(from);
    copy.value[p] = load_piece(from + BLOCK_TOKENS * D);
    keep_load_order();
}

// Stores vector p of the keys and of the values of positions [at, at + STEP) to shared memory. Positions that are not
// present are zero-filled.
DEV void store_key_and_value(KV* stage, const KvCopy& copy, u32 p, const RowKvSource& row, u32 at) {
    const u32 key = copied_key(p);
    const bool present = is_present(row, at + key);
    store_loaded(stage + key * K_STRIDE + copied_channel(), copy.key[p], present);
    store_loaded(stage + STEP * K_STRIDE + key * V_STRIDE + copied_channel(), copy.value[p], present);
}

// Copies the keys before `end` to `stage` in steps of STEP keys, and calls multiply(stage, first key) for each step.
// The number of steps is rounded up to a multiple of STEPS_AHEAD; steps from `end` on are not multiplied. Every thread
// of the block must call it.
template <class Multiply>
DEV void copy_and_multiply(KV* stage, const KV* pool, const RowKvSource& row, u32 end, const Multiply& multiply) {
    KvCopy copies[STEPS_AHEAD];
    const u32 begin = first_step(row);
    KvBlocks blocks = load_blocks(row, begin);
    UNROLL for (u32 d = 0; d < STEPS_AHEAD; ++d) {
        const KvBlocks next = load_blocks(row, begin + (d + 1) * STEP);
        UNROLL for (u32 p = 0; p < OWN; ++p) load_key_and_value(copies[d], p, pool, row, blocks, begin + d * STEP);
        blocks = next;
    }
    for (u32 first = begin; first < end; first += STEPS_AHEAD * STEP) {
        UNROLL for (u32 d = 0; d < STEPS_AHEAD; ++d) {
            const u32 at = first + d * STEP;
            const KvBlocks next = load_blocks(row, at + (STEPS_AHEAD + 1) * STEP);
            UNROLL for (u32 p = 0; p < OWN; ++p) {
                store_key_and_value(stage, copies[d], p, row, at);
                load_key_and_value(copies[d], p, pool, row, blocks, at + STEPS_AHEAD * STEP);
            }
            blocks = next;
            sync();
            if (d == 0 || at < end) multiply(stage, at);
            sync();
        }
    }
}
