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

// The part of a record that is copied to shared memory. LDS of 64 KiB has no room for tiles, which are read from memory.
#if WARP_SIZE == 64
typedef KeyFactors StagedState;
typedef QueryFactors StagedOutput;
DEV const StagedState& staged_part(const StateRecord& record) { return record.factors; }
DEV const StagedOutput& staged_part(const OutputRecord& record) { return record.factors; }
DEV const KeyFactors& factors_of(const StagedState& staged) { return staged; }
DEV const QueryFactors& factors_of(const StagedOutput& staged) { return staged; }
DEV const StateRecord& tiles_of(const StagedState&, const StateRecord& record) { return record; }
DEV const OutputRecord& tiles_of(const StagedOutput&, const OutputRecord& record) { return record; }
#else
typedef StateRecord StagedState;
typedef OutputRecord StagedOutput;
DEV const StagedState& staged_part(const StateRecord& record) { return record; }
DEV const StagedOutput& staged_part(const OutputRecord& record) { return record; }
DEV const KeyFactors& factors_of(const StagedState& staged) { return staged.factors; }
DEV const QueryFactors& factors_of(const StagedOutput& staged) { return staged.factors; }
DEV const StateRecord& tiles_of(const StagedState& staged, const StateRecord&) { return staged; }
DEV const OutputRecord& tiles_of(const StagedOutput& staged, const OutputRecord&) { return staged; }
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

// Calls copy(n, to, from, present) for piece n of the rows of a chunk that this thread copies.
template <u32 PIECES, u32 COPIES, class Copy>
DEV void each_piece(half_t* to, u32 to_stride, const half_t* from, const RowInputs& row, u32 chunk, u32 n, const Copy& copy) {
    constexpr u32 STEP = COPY_THREADS / PIECES;
    const u32 first = copy_thread() / PIECES, at = copy_thread() % PIECES * 8, left = row.tokens - chunk * CHUNK;
    to += first * to_stride + at;
    from += (u64)chunk * CHUNK * row.stride + at;
    UNROLL for (u32 c = 0; c < COPIES; ++c) {
        const u32 token = first + c * STEP;
        copy(n + c, to + c * STEP * to_stride, from + (token < left ? token : 0) * row.stride, token < left);
    }
}
// Calls copy(n, to, from, true) for the pieces FIRST to LAST - 1, which are of a part of a record.
template <u32 FIRST, u32 LAST, class Part, class Copy> DEV void record_pieces(Part& to, const Part& from, const Copy& copy) {
    UNROLL for (u32 n = FIRST; n < LAST; ++n) {
        const u32 at = ((n - FIRST) * COPY_THREADS + copy_thread()) * 16;
        if (at < sizeof(Part)) copy(n, (u8*)&to + at, (const u8*)&from + at, true);
    }
}
template <class Copy> DEV void each_state_piece(StateStage& to, const RowInputs& row, u32 chunk, const Copy& copy) {
    each_piece<KEY_PIECES, ROW_COPIES>(to.k, K_STRIDE, row.k, row, chunk, 0, copy);
    each_piece<VALUE_PIECES, VALUE_COPIES>(to.v, V_STRIDE, row.v, row, chunk, ROW_COPIES, copy);
    record_pieces<ROW_COPIES + VALUE_COPIES, STATE_COPIES>(to.record, staged_part(record_of(row, chunk).state), copy);
}
template <class Copy> DEV void each_output_piece(OutputStage& to, const RowInputs& row, u32 chunk, const Copy& copy) {
    each_piece<KEY_PIECES, ROW_COPIES>(to.q, K_STRIDE, row.q, row, chunk, 0, copy);
    record_pieces<ROW_COPIES, OUTPUT_COPIES>(to.record, staged_part(record_of(row, chunk).output), copy);
}

// Copies of the inputs of a turn: state warps are at chunk `turn`, output warps at the chunk before.
#if WARP_SIZE == 64
struct TurnCopies { u32x4 state[STATE_COPIES], output[OUTPUT_COPIES]; };
DEV void start_copies(TurnCopies& copies, WalkShared& s, const RowInputs& row, u32 turn, u32 chunks) {
    if (turn < chunks)
        each_state_piece(s.state[0], row, turn,
                         [&](u32 n, void*, const void* from, bool) { copies.state[n] = load_piece(from); });
    if (turn > 0 && turn <= chunks)
        each_output_piece(s.output[0], row, turn - 1,
                          [&](u32 n, void*, const void* from, bool) { copies.output[n] = load_piece(from); });
}
DEV void finish_copies(TurnCopies& copies, WalkShared& s, const RowInputs& row, u32 turn, u32 chunks) {
    sync();  // The stages are read until the end of the previous turn.
    if (turn < chunks)
        each_state_piece(s.state[0], row, turn,
                         [&](u32 n, void* to, const void*, bool present) { store_loaded(to, copies.state[n], present); });
    if (turn > 0)
        each_output_piece(s.output[0], row, turn - 1,
                          [&](u32 n, void* to, const void*, bool present) { store_loaded(to, copies.output[n], present); });
    wait_shared();
    sync();
}
#else
struct TurnCopies {};
DEV void start_copies(TurnCopies&, WalkShared& s, const RowInputs& row, u32 turn, u32 chunks) {
    if (tid() < ROLE_THREADS) return;
    const auto copy = [](u32, void* to, const void* from, bool present) { cp_async16_zfill(to, from, present); };
    if (turn < chunks) each_state_piece(s.state[turn % STAGES], row, turn, copy);
    if (turn > 0 && turn <= chunks) each_output_piece(s.output[(turn - 1) % STAGES], row, turn - 1, copy);
    cp_async_commit();
}
DEV void finish_copies(TurnCopies&, WalkShared&, const RowInputs&, u32, u32) {
    cp_async_wait<0>();
    sync();
}
#endif
