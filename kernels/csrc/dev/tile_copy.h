// dev/tile_copy.h - copies lines of global memory to shared memory in steps, through registers: the pipeline of
// wavefronts of 64 lanes, which have no asynchronous copies.
//
// A step copies STEP consecutive elements of each of LINES lines (rows of x or W); each thread copies COUNT
// vectors of 16 bytes. As soon as copy_store() has stored a vector, copy_load() loads that of the step AHEAD steps
// later into its register: AHEAD * COUNT loads are in flight at every wait. copy_load() has no branch, because on
// AMD a branch ends with a wait for the loads inside it.
#pragma once
#include "dev/register_copy.h"

template <class T, u32 LINES, u32 STEP, u32 THREADS, u32 AHEAD> struct TileCopy {
    enum : u32 { PIECE = 16 / sizeof(T), LINE_PIECES = STEP / PIECE, COUNT = LINES * LINE_PIECES / THREADS };
    static_assert(COUNT * THREADS == LINES * LINE_PIECES, "threads copy different numbers of pieces");
    static_assert(THREADS % LINE_PIECES == 0, "a thread's pieces are in different columns");
    const T* line[COUNT];         // line of each piece of this thread
    bool present[COUNT];          // whether the line exists; others are zeros
    u32x4 piece[AHEAD][COUNT];    // loaded pieces by step
};

#define TILE_COPY template <class T, u32 LINES, u32 STEP, u32 THREADS, u32 AHEAD
#define TILE_COPY_TYPE TileCopy<T, LINES, STEP, THREADS, AHEAD>

// Returns the first column, within a step, of the 16-byte vectors that this thread copies.
TILE_COPY> DEV u32 copy_column(const TILE_COPY_TYPE&) {
    return tid() % TILE_COPY_TYPE::LINE_PIECES * TILE_COPY_TYPE::PIECE;
}

// Sets the addresses of the lines to copy. line(r) returns the address of line r, or null if the line does
// not exist: zeros are then stored for it, and its loads read the existing line `other`.
TILE_COPY, class Line> DEV void copy_lines(TILE_COPY_TYPE& copy, const Line& line, const T* other) {
    UNROLL for (u32 p = 0; p < TILE_COPY_TYPE::COUNT; ++p) {
        const T* from = line((tid() + p * THREADS) / TILE_COPY_TYPE::LINE_PIECES);
        copy.present[p] = from != nullptr;
        copy.line[p] = from ? from : other;
    }
}

// Loads piece p of elements [at, at + STEP) of the lines into register set `slot`. Lines have k elements; a vector
// past the end of a line reads the start of the line instead.
TILE_COPY> DEV void copy_load(TILE_COPY_TYPE& copy, u32 p, u32 slot, u32 k, u32 at) {
    const u32 column = at + copy_column(copy), from = column < k ? column : 0;
    copy.piece[slot][p] = load_piece(copy.line[p] + from);
    keep_load_order();
}

// Stores piece p of elements [at, at + STEP) of the lines from register set `slot` to shared memory. place(line, column)
// returns the offset of the piece at element `column` of a line. Zeros are stored for lines that do not exist and for
// elements from k on.
TILE_COPY, class Place>
DEV void copy_store(T* stage, const Place& place, const TILE_COPY_TYPE& copy, u32 p, u32 slot, u32 k, u32 at) {
    const u32 column = copy_column(copy), line = (tid() + p * THREADS) / TILE_COPY_TYPE::LINE_PIECES;
    store_loaded(stage + place(line, column), copy.piece[slot][p], at + column < k && copy.present[p]);
}

// Copies lines of k elements to `stage` in steps of STEP elements, to the places that copy_store() documents, and calls
// multiply(slot) for each step while the loads of the next steps are in flight. prefetch(slot, at) is called one step ahead, for loads of
// other data that the step needs; these loads complete before the loads of later steps. The number of steps
// is rounded up to a multiple of AHEAD; steps beyond k are copied as zeros and not multiplied. copy_lines()
// must have been called. Every thread must call it.
TILE_COPY, class Place, class Prefetch, class Multiply>
DEV void copy_steps(T* stage, const Place& place, TILE_COPY_TYPE& copy, u32 k, const Prefetch& prefetch, const Multiply& multiply) {
    static_assert(AHEAD >= 2, "the slot of the next step is the current one");
    prefetch(0, 0);
    keep_load_order();
    UNROLL for (u32 d = 0; d < AHEAD; ++d)
        UNROLL for (u32 p = 0; p < TILE_COPY_TYPE::COUNT; ++p) copy_load(copy, p, d, k, d * STEP);
    for (u32 begin = 0; begin < k; begin += AHEAD * STEP) {
        UNROLL for (u32 d = 0; d < AHEAD; ++d) {
            const u32 at = begin + d * STEP;
            prefetch((d + 1) % AHEAD, at + STEP < k ? at + STEP : (k - 1) / STEP * STEP);
            keep_load_order();
            UNROLL for (u32 p = 0; p < TILE_COPY_TYPE::COUNT; ++p) {
                copy_store(stage, place, copy, p, d, k, at);
                copy_load(copy, p, d, k, at + AHEAD * STEP);
            }
            sync();
            if (at < k) multiply(d);
            sync();
        }
    }
}
#undef TILE_COPY
#undef TILE_COPY_TYPE
