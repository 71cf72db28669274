// gdn_chunk/chunk.h - chunks of a row, and the record of a chunk and value head that gdn_chunk_prepare writes and
// gdn_chunk_walk reads.
#pragma once
#include "gdn_chunk/columns.h"

enum : u32 {
    CHUNK = 64,                             // tokens of a chunk
    RECURRENT_TOKENS = 17,                  // rows of at most these tokens are left to gdn_delta_rule
    TILES = CHUNK / 16,                     // tiles of 16 tokens
    PAIRS = TILES * (TILES + 1) / 2,        // tiles on and below the diagonal of a [CHUNK, CHUNK] matrix
    KEY_TILES = KEY_DIM / 16,
    K_STRIDE = KEY_DIM + 8,                 // row stride of queries and keys in shared memory
    KEY_PIECES = KEY_DIM / 8                // 16-byte pieces of a query or key
};
DEV u32 pair_index(u32 i, u32 j) { return i * (i + 1) / 2 + j; }

// Factors of the tokens of a chunk. G(i): sum of the logarithms of the decay up to and with token i. Queries and keys are
// not normalized before products; these factors contain the reciprocals of their norms.
struct alignas(16) KeyFactors {
    float read[CHUNK];    // key times the state before the chunk: e^G(i) / |k|
    float write[CHUNK];   // key times delta, added to the state after the chunk: e^(G(last) - G(i)) / |k|
    float total[4];       // the state itself: e^G(last)
};
struct alignas(16) QueryFactors { float read[CHUNK]; };  // e^G(i) / |q| / sqrt(KEY_DIM)

// What the update of the state and the outputs of a chunk need.
struct alignas(16) StateRecord {
    TileOperand inverse[PAIRS][WARP_SIZE];  // (I + A)^-1 diag(beta), A = tril(diag(beta) K K^T * decay, -1)
    KeyFactors factors;
};
struct alignas(16) OutputRecord {
    FragA scores[PAIRS][WARP_SIZE];  // tril(Q K^T * decay)
    QueryFactors factors;
};
struct ChunkRecord {
    StateRecord state;
    OutputRecord output;
};

// Index of the first record of a row. Records between those of two rows are not used.
DEV u32 first_record(const i32* cu_q, u32 row) { return (u32)cu_q[row] / CHUNK + row; }

// Tokens of a chunk; none if there is no chunk to compute.
struct ChunkTokens { u32 first, tokens; };
// Returns the tokens of the chunk with record `record`. Every thread of the block must call it.
DEV ChunkTokens chunk_of_record(const i32* cu_q, u32 rows, u32 record) {
    SHARED(ChunkTokens, found, 1);
    if (tid() == 0) found[0] = {0, 0};
    sync();
    for (u32 row = tid(); row < rows; row += bdim()) {
        const u32 begin = first_record(cu_q, row);
        if (record < begin || record >= first_record(cu_q, row + 1)) continue;
        const u32 first = (u32)cu_q[row], end = (u32)cu_q[row + 1], at = first + (record - begin) * CHUNK;
        if (end - first > RECURRENT_TOKENS && at < end) found[0] = {at, end - at < CHUNK ? end - at : CHUNK};
    }
    sync();
    return found[0];
}
