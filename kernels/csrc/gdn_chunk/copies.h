// gdn_chunk/copies.h - what a block of gdn_chunk_walk has in shared memory, and how it gets there: by cp.async on NVIDIA, through
// registers on AMD. The inputs of a chunk are copied while the previous chunk is computed.
#pragma once
#include "gdn_chunk/chunk.h"
#include "dev/register_copy.h"

enum : u32 {
    COLUMNS = 16 * COLUMN_WARPS,
    ROLE_THREADS = COLUMN_WARPS * WARP_SIZE,  // threads of the state warps, and of the output warps
    WALK_THREADS = 2 * ROLE_THREADS,
    V_STRIDE = COLUMNS + 8,
    STAGES = WARP_SIZE == 64 ? 1 : 2  // AMD GPUs copy through registers, which are the second stage
};

// The part of a record that is copied to shared memory. LDS of 64 KiB has no room for tiles, which are loaded to registers.
#if WARP_SIZE == 64
typedef KeyFactors StagedState;
typedef QueryFactors StagedOutput;
DEV const StagedState& staged_part(const StateRecord& record) { return record.factors; }
DEV const StagedOutput& staged_part(const OutputRecord& record) { return record.factors; }
DEV const KeyFactors& factors_of(const StagedState& staged) { return staged; }
DEV const QueryFactors& factors_of(const StagedOutput& staged) { return staged; }
#else
typedef StateRecord StagedState;
typedef OutputRecord StagedOutput;
DEV const StagedState& staged_part(const StateRecord& record) { return record; }
DEV const StagedOutput& staged_part(const OutputRecord& record) { return record; }
DEV const KeyFactors& factors_of(const StagedState& staged) { return staged.factors; }
DEV const QueryFactors& factors_of(const StagedOutput& staged) { return staged.factors; }
#endif

// Inputs of a state warp and of an output warp in shared memory.
struct alignas(16) StateStage {
    half_t k[CHUNK * K_STRIDE];
    half_t v[CHUNK * V_STRIDE];
    StagedState record;
};
struct alignas(16) OutputStage {
    half_t q[CHUNK * K_STRIDE];
    StagedOutput record;
};
// Exchange buffer: fragments that a state warp (producer) stores for its output warp (consumer).
struct ChunkExchange {
    FragB state[KEY_TILES][WARP_SIZE];
    FragB delta[TILES][WARP_SIZE];
};
struct WalkShared {
    StateStage state[STAGES];
    OutputStage output[STAGES];
    ChunkExchange exchange[2][COLUMN_WARPS];
};

// Inputs of a row for a block: the queries and keys of a head, value columns, and the records of the chunks.
struct RowInputs {
    const half_t* q; const half_t* k; const half_t* v;
    const ChunkRecord* records;
    u32 stride, record_stride, tokens;
};
DEV const ChunkRecord& record_of(const RowInputs& row, u32 chunk) { return row.records[(u64)chunk * row.record_stride]; }

// Threads that copy: on NVIDIA the output warps, which have fewer products.
#if WARP_SIZE == 64
enum : u32 { COPY_THREADS = WALK_THREADS };
DEV u32 copy_thread() { return tid(); }
#else
enum : u32 { COPY_THREADS = ROLE_THREADS };
DEV u32 copy_thread() { return tid() - ROLE_THREADS; }
#endif
enum : u32 {
    ROW_COPIES = CHUNK * KEY_PIECES / COPY_THREADS,     // 16-byte pieces of queries or keys that a thread copies
    VALUE_PIECES = COLUMNS / 8,
    VALUE_COPIES = CHUNK * VALUE_PIECES / COPY_THREADS,
    STATE_COPIES = ROW_COPIES + VALUE_COPIES + (sizeof(StagedState) / 16 + COPY_THREADS - 1) / COPY_THREADS,
    OUTPUT_COPIES = ROW_COPIES + (sizeof(StagedOutput) / 16 + COPY_THREADS - 1) / COPY_THREADS
};
static_assert(ROW_COPIES * COPY_THREADS == CHUNK * KEY_PIECES, "threads copy different numbers of pieces");

// A 16-byte piece of the inputs of a chunk that a thread copies.
struct Piece {
    void* to;
    const void* from;
    bool present;  // whether it exists; others are zeros, and `from` is another place
    bool own;      // whether this thread copies it
};
// Returns piece c of this thread, of rows of PIECES pieces; each COPY_THREADS / PIECES rows have one.
template <u32 PIECES> DEV Piece row_piece(half_t* to, u32 to_stride, const half_t* from, const RowInputs& row, u32 chunk, u32 c) {
    constexpr u32 STEP = COPY_THREADS / PIECES;
    const u32 first = copy_thread() / PIECES, at = copy_thread() % PIECES * 8, left = row.tokens - chunk * CHUNK;
    const u32 token = first + c * STEP;
    to += first * to_stride + at;
    from += (u64)chunk * CHUNK * row.stride + at;
    return {to + c * STEP * to_stride, from + (token < left ? token : 0) * row.stride, token < left, true};
}
// Returns piece c of this thread, of a part of a record.
template <class Part> DEV Piece record_piece(Part& to, const Part& from, u32 c) {
    const u32 at = (c * COPY_THREADS + copy_thread()) * 16;
    const bool own = at < sizeof(Part);
    // On AMD all threads load, so that the load needs no branch.
    return {(u8*)&to + at, (const u8*)&from + (own || WARP_SIZE == 32 ? at : 0), true, own};
}
// Calls copy(n, piece of chunk `chunk`, the same piece of chunk `next`) for each piece of this thread.
template <class Copy> DEV void each_state_piece(StateStage& to, const RowInputs& row, u32 chunk, u32 next, const Copy& copy) {
    UNROLL for (u32 c = 0; c < ROW_COPIES; ++c)
        copy(c, row_piece<KEY_PIECES>(to.k, K_STRIDE, row.k, row, chunk, c), row_piece<KEY_PIECES>(to.k, K_STRIDE, row.k, row, next, c));
    UNROLL for (u32 c = 0; c < VALUE_COPIES; ++c)
        copy(ROW_COPIES + c, row_piece<VALUE_PIECES>(to.v, V_STRIDE, row.v, row, chunk, c),
             row_piece<VALUE_PIECES>(to.v, V_STRIDE, row.v, row, next, c));
    UNROLL for (u32 c = 0; c < STATE_COPIES - ROW_COPIES - VALUE_COPIES; ++c)
        copy(ROW_COPIES + VALUE_COPIES + c, record_piece(to.record, staged_part(record_of(row, chunk).state), c),
             record_piece(to.record, staged_part(record_of(row, next).state), c));
}
template <class Copy> DEV void each_output_piece(OutputStage& to, const RowInputs& row, u32 chunk, u32 next, const Copy& copy) {
    UNROLL for (u32 c = 0; c < ROW_COPIES; ++c)
        copy(c, row_piece<KEY_PIECES>(to.q, K_STRIDE, row.q, row, chunk, c), row_piece<KEY_PIECES>(to.q, K_STRIDE, row.q, row, next, c));
    UNROLL for (u32 c = 0; c < OUTPUT_COPIES - ROW_COPIES; ++c)
        copy(ROW_COPIES + c, record_piece(to.record, staged_part(record_of(row, chunk).output), c),
             record_piece(to.record, staged_part(record_of(row, next).output), c));
}

// Copies of the inputs of a turn: state warps are at chunk `turn`, output warps at the chunk before.
#if WARP_SIZE == 64
// Vectors that are loaded a turn ahead. No branch decides whether a load happens: after one, the compiler counts only the loads
// that are in flight on both paths, and waits for more than it needs. If a turn has no chunk for the state or the output warps,
// they load another chunk, which is not used.
struct TurnCopies {
    u32x4 state[STATE_COPIES], output[OUTPUT_COPIES];
    FragA tile[PAIRS];  // inverse in state warps, scores in output warps
};
struct TurnChunks { u32 state, output; };
DEV TurnChunks chunks_of(u32 turn, u32 chunks) {
    const u32 last = turn == 0 ? 0 : turn - 1;
    return {turn < chunks ? turn : chunks - 1, last < chunks ? last : chunks - 1};
}

// Loads the tiles of a turn. They are newer than the copies of that turn, so that waits for tiles leave the copies for the
// turn after it in flight.
DEV void load_tiles(TurnCopies& copies, const RowInputs& row, bool of_state, u32 turn, u32 chunks) {
    const TurnChunks at = chunks_of(turn, chunks);
    const ChunkRecord& record = record_of(row, of_state ? at.state : at.output);
    const FragA* tiles = of_state ? record.state.inverse[0] : record.output.scores[0];
    UNROLL for (u32 n = 0; n < PAIRS; ++n) {
        copies.tile[n] = (tiles + n * WARP_SIZE)[lane()];
        keep_load_order();
    }
}
DEV void load(u32x4& piece, const Piece& from) {
    piece = load_piece(from.from);
    keep_load_order();
}
// Stores a loaded piece, and loads that of the next turn into its registers.
DEV void replace(u32x4& piece, const Piece& stored, const Piece& next) {
    const u32x4 loaded = pinned(piece);  // The wait is not in the branch.
    if (stored.own) store_loaded(stored.to, loaded, stored.present);
    load(piece, next);
}
// Loads the inputs of the first turn.
DEV void begin_copies(TurnCopies& copies, WalkShared& s, const RowInputs& row, bool of_state, u32 chunks) {
    each_state_piece(s.state[0], row, 0, 0, [&](u32 n, const Piece& first, const Piece&) { load(copies.state[n], first); });
    each_output_piece(s.output[0], row, 0, 0, [&](u32 n, const Piece& first, const Piece&) { load(copies.output[n], first); });
    load_tiles(copies, row, of_state, 0, chunks);
}
// Stores the inputs of a turn to shared memory, and loads those of the next one.
DEV void next_stage(TurnCopies& copies, WalkShared& s, const RowInputs& row, u32 turn, u32 chunks) {
    const TurnChunks now = chunks_of(turn, chunks), next = chunks_of(turn + 1, chunks);
    sync();  // The stages are read until the end of the previous turn.
    each_state_piece(s.state[0], row, now.state, next.state,
                     [&](u32 n, const Piece& stored, const Piece& loaded) { replace(copies.state[n], stored, loaded); });
    each_output_piece(s.output[0], row, now.output, next.output,
                      [&](u32 n, const Piece& stored, const Piece& loaded) { replace(copies.output[n], stored, loaded); });
    wait_shared();
    sync();
}
#else
struct TurnCopies {};
DEV void start_copies(WalkShared& s, const RowInputs& row, u32 turn, u32 chunks) {
    if (tid() < ROLE_THREADS) return;
    const auto copy = [](u32, const Piece& piece, const Piece&) {
        if (piece.own) cp_async16_zfill(piece.to, piece.from, piece.present);
    };
    if (turn < chunks) each_state_piece(s.state[turn % STAGES], row, turn, turn, copy);
    if (turn > 0 && turn <= chunks) each_output_piece(s.output[(turn - 1) % STAGES], row, turn - 1, turn - 1, copy);
    cp_async_commit();
}
DEV void begin_copies(TurnCopies&, WalkShared& s, const RowInputs& row, bool, u32 chunks) { start_copies(s, row, 0, chunks); }
DEV void next_stage(TurnCopies&, WalkShared& s, const RowInputs& row, u32 turn, u32 chunks) {
    cp_async_wait<0>();
    sync();
    start_copies(s, row, turn + 1, chunks);
}
DEV void load_tiles(TurnCopies&, const RowInputs&, bool, u32, u32) {}
#endif
