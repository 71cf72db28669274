// mla_prefill/register_copy.h - copies keys and values with warps of 64 lanes through registers. As soon as a vector
// of a run (COPIED successive keys and values) has been stored to shared memory, that of the next run is loaded into
// its register: COUNT vectors of a lane are in flight at every wait.
#pragma once
#include "dev/register_copy.h"

enum : u32 {
    OWN_PIECES = QK_NOPE_HEAD_DIM / 8,                // pieces of a key's qk_nope part
    KEY_PIECES = OWN_PIECES + QK_ROPE_HEAD_DIM / 8,
    PIECES = KEY_PIECES + VALUE / 8,                  // pieces of a key and its value
    COUNT = COPIED * PIECES / 256                     // pieces per thread and run
};
static_assert(COUNT * 256 == COPIED * PIECES, "threads copy different numbers of pieces");

// Registers of a thread for the 16-byte vectors that it copies of a run of COPIED keys and values.
struct KvRunCopy { u32x4 piece[COUNT]; };

// Loads vector p of a run of COPIED keys and values of one head, from key `row` of the window on.
DEV void load_vector(KvRunCopy& copy, u32 p, const MlaPrefillParams& job, u32 head, u32 row) {
    const u32 i = tid() + p * 256, key = i / PIECES, piece = i % PIECES;
    const u32 own = head * QK_NOPE_HEAD_DIM + piece * 8, rope = job.rope_column + (piece - OWN_PIECES) * 8;
    const u32 value = job.values + head * VALUE + (piece - KEY_PIECES) * 8;
    const u32 column = piece < OWN_PIECES ? own : piece < KEY_PIECES ? rope : value;
    copy.piece[p] = load_piece(job.kv + (u64)(row + key) * job.kv_stride + column);
    keep_load_order();
}

DEV void store_vector(half_t* stage, const KvRunCopy& copy, u32 p) {
    const u32 i = tid() + p * 256, key = i / PIECES, piece = i % PIECES;
    const u32 of_value = COPIED * K_STRIDE + key * V_STRIDE + (piece - KEY_PIECES) * 8;
    store_loaded(stage + (piece < KEY_PIECES ? key * K_STRIDE + piece * 8 : of_value), copy.piece[p], true);
}

// Copies keys [at, at + COPIED), [at + COPIED, at + 2 COPIED), .. up to `end` to `stage`, and calls
// multiply(stage, first key) for each of these runs. Key `at` of the row is key `from` of the window. Every
// thread of the block must call it.
template <class Multiply>
DEV void copy_and_multiply(half_t* stage, const MlaPrefillParams& job, u32 head, u32 at, u32 end, u32 from,
                           const Multiply& multiply) {
    KvRunCopy copy;
    UNROLL for (u32 p = 0; p < COUNT; ++p) load_vector(copy, p, job, head, from);
    for (; at < end; at += COPIED) {
        if (at + COPIED < end) from += COPIED;  // The last run is loaded twice, to avoid a branch.
        UNROLL for (u32 p = 0; p < COUNT; ++p) {
            store_vector(stage, copy, p);
            load_vector(copy, p, job, head, from);
        }
        sync();
        multiply(stage, at);
        sync();
    }
}
