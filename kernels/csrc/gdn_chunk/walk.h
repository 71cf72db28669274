// gdn_chunk/walk.h - a block has the state of 16 * COLUMN_WARPS value columns of a head in registers and processes the chunks of
// a row in order. The first COLUMN_WARPS warps update the state; each passes its state before the chunk and the deltas of the
// chunk to an output warp, which computes the outputs while the state warp is at the next chunk.
#pragma once
#include "gdn_chunk/copies.h"

// The state of 16 value columns: tile t has keys 16t to 16t + 15.
struct ColumnState { FragC tile[KEY_TILES]; };

// Offset of element e of tile t of a lane.
DEV u64 state_offset(u32 t, u32 e, u32 value_dim) {
#if WARP_SIZE == 64
    // The sum of a scalar and of one of four offsets of the lane, which take fewer registers than an offset per tile.
    return (u64)t * 16 * value_dim + (index_of(e) * value_dim + column_of(e));
#else
    return (u64)(t * 16 + index_of(e)) * value_dim + column_of(e);
#endif
}
DEV void load_state(ColumnState& s, const float* from, u32 value_dim, bool present) {
    UNROLL for (u32 t = 0; t < KEY_TILES; ++t)
        UNROLL for (u32 e = 0; e < FragLayout::NC; ++e)
            s.tile[t].x[e] = present ? from[state_offset(t, e, value_dim)] : 0.f;
}
// Waits for the loads of the state. Otherwise the compiler would wait for them in every turn, and also for newer loads.
DEV void wait_for_state(ColumnState& s) {
    UNROLL for (u32 t = 0; t < KEY_TILES; ++t)
        UNROLL for (u32 e = 0; e < FragLayout::NC; ++e) s.tile[t].x[e] = as_f32(pinned(as_u32(s.tile[t].x[e])));
}
DEV void store_state(float* to, const ColumnState& s, u32 value_dim) {
    UNROLL for (u32 t = 0; t < KEY_TILES; ++t)
        UNROLL for (u32 e = 0; e < FragLayout::NC; ++e)
            to[state_offset(t, e, value_dim)] = s.tile[t].x[e];
}

// Operands of 16 columns: of the tokens of a chunk, of all keys.
struct TokenColumns { ColumnOperand tile[TILES]; };
struct KeyColumns { ColumnOperand tile[KEY_TILES]; };

// Returns v - e^G K s for each token and column, the right-hand side of (I + A) delta = diag(beta) (v - e^G K s).
DEV TokenColumns value_residuals(const KeyColumns& state, const StateStage& stage, u32 column) {
    FragC known[TILES];
    UNROLL for (u32 i = 0; i < TILES; ++i) known[i] = zero_c();
    UNROLL for (u32 t = 0; t < KEY_TILES; ++t)
        UNROLL for (u32 i = 0; i < TILES; ++i)
            multiply(known[i], load_tile(stage.k + i * 16 * K_STRIDE + t * 16, K_STRIDE), state.tile[t]);
    const KeyFactors& factors = factors_of(stage.record);
    TokenColumns residuals;
    UNROLL for (u32 i = 0; i < TILES; ++i) {
        const ColumnOperand v = load_columns(stage.v + i * 16 * V_STRIDE + column, V_STRIDE);
        UNROLL for (u32 e = 0; e < FragLayout::NC; ++e)
            known[i].x[e] = fma_(-factors.read[i * 16 + index_of(e)], known[i].x[e], f32(v.x[e]));
        residuals.tile[i] = rounded<ColumnOperand>(known[i]);
    }
    return residuals;
}

// Tiles of a chunk: on AMD in registers, on NVIDIA in shared memory.
struct InverseTiles { TileOperand tile[PAIRS]; };
struct ScoreTiles { FragA tile[PAIRS]; };
#if WARP_SIZE == 64
DEV InverseTiles inverse_of(const StagedState&, const TurnCopies& copies) { return bits_as<InverseTiles>(copies.tile); }
DEV ScoreTiles scores_of(const StagedOutput&, const TurnCopies& copies) { return bits_as<ScoreTiles>(copies.tile); }
#else
DEV InverseTiles inverse_of(const StagedState& staged, const TurnCopies&) {
    InverseTiles inverse;
    UNROLL for (u32 n = 0; n < PAIRS; ++n) inverse.tile[n] = staged.inverse[n][lane()];
    return inverse;
}
DEV ScoreTiles scores_of(const StagedOutput& staged, const TurnCopies&) {
    ScoreTiles scores;
    UNROLL for (u32 n = 0; n < PAIRS; ++n) scores.tile[n] = staged.scores[n][lane()];
    return scores;
}
#endif

// Solves (I + A) delta = diag(beta) residuals, passes delta to the output warp, and returns e^(G(last) - G) delta / |k|.
DEV TokenColumns written_deltas(const TokenColumns& residuals, const InverseTiles& inverse, const KeyFactors& factors,
                                ChunkExchange& exchange) {
    FragC delta[TILES];
    UNROLL for (u32 i = 0; i < TILES; ++i) delta[i] = zero_c();
    UNROLL for (u32 j = 0; j < TILES; ++j)
        UNROLL for (u32 i = j; i < TILES; ++i) multiply(delta[i], inverse.tile[pair_index(i, j)], residuals.tile[j]);
    TokenColumns written;
    UNROLL for (u32 i = 0; i < TILES; ++i) {
        FragC scaled;
        UNROLL for (u32 e = 0; e < FragLayout::NC; ++e) scaled.x[e] = delta[i].x[e] * factors.write[i * 16 + index_of(e)];
        written.tile[i] = rounded<ColumnOperand>(scaled);
    }
    // Stored last, because loads of shared memory are not moved over stores.
    UNROLL for (u32 i = 0; i < TILES; ++i) exchange.delta[i][lane()] = as_b(rounded<ColumnOperand>(delta[i]));
    return written;
}

// Updates the state of 16 columns by a chunk: s = e^G(last) s + sum of e^(G(last) - G) k delta^T.
DEV void update_state(ColumnState& s, const StateStage& stage, const TurnCopies& copies, u32 column, ChunkExchange& exchange) {
    KeyColumns state;
    UNROLL for (u32 t = 0; t < KEY_TILES; ++t) state.tile[t] = rounded<ColumnOperand>(s.tile[t]);
    UNROLL for (u32 t = 0; t < KEY_TILES; ++t) exchange.state[t][lane()] = as_b(state.tile[t]);
    const TokenColumns residuals = value_residuals(state, stage, column);
    const InverseTiles inverse = inverse_of(stage.record, copies);  // On NVIDIA a load, not before registers are free.
    const KeyFactors& factors = factors_of(stage.record);
    const TokenColumns written = written_deltas(residuals, inverse, factors, exchange);
    const float total = factors.total[0];
    UNROLL for (u32 t = 0; t < KEY_TILES; ++t)
        UNROLL for (u32 e = 0; e < FragLayout::NC; ++e) s.tile[t].x[e] *= total;
    UNROLL for (u32 i = 0; i < TILES; ++i)
        UNROLL for (u32 t = 0; t < KEY_TILES; ++t)
            multiply(s.tile[t], load_transposed(stage.k + i * 16 * K_STRIDE + t * 16, K_STRIDE), written.tile[i]);
}

// Stores a tile of outputs of 16 tokens and 16 columns, of which `tokens` are in the row.
DEV void store_outputs(half_t* o, u32 o_stride, const FragC& out, u32 tokens) {
#if WARP_SIZE == 64
    UNROLL for (u32 e = 0; e < FragLayout::NC; ++e)
        if (FragLayout::c_row(e) < tokens) o[(u64)FragLayout::c_row(e) * o_stride + FragLayout::c_col(e)] = to_half(out.x[e]);
#else
    UNROLL for (u32 e = 0; e < FragLayout::NC; e += 2)
        if (FragLayout::c_row(e) < tokens)
            *(u32*)(o + (u64)FragLayout::c_row(e) * o_stride + FragLayout::c_col(e)) = pack_half(out.x[e], out.x[e + 1]);
#endif
}

// Computes the outputs of a chunk: e^G Q s + tril(Q K^T * decay) delta.
DEV void chunk_outputs(half_t* o, u32 o_stride, const OutputStage& stage, const TurnCopies& copies, const ChunkExchange& exchange,
                       u32 tokens) {
    const QueryFactors& factors = factors_of(stage.record);
    const ScoreTiles scores = scores_of(stage.record, copies);
    FragC out[TILES];
    UNROLL for (u32 i = 0; i < TILES; ++i) out[i] = zero_c();
    UNROLL for (u32 t = 0; t < KEY_TILES; ++t) {
        const FragB state = exchange.state[t][lane()];
        UNROLL for (u32 i = 0; i < TILES; ++i) mma16(out[i], load_a(stage.q + i * 16 * K_STRIDE + t * 16, K_STRIDE), state);
    }
    const auto store = [&](u32 i) {
        store_outputs(o + (u64)i * 16 * o_stride, o_stride, out[i], tokens > i * 16 ? tokens - i * 16 : 0);
    };
    UNROLL for (u32 i = 0; i < TILES; ++i) {
        UNROLL for (u32 e = 0; e < FragLayout::NC; ++e) out[i].x[e] *= factors.read[i * 16 + FragLayout::c_row(e)];
        UNROLL for (u32 j = 0; j <= i; ++j) mma16(out[i], scores.tile[pair_index(i, j)], exchange.delta[j][lane()]);
        if (WARP_SIZE == 32) store(i);
    }
    // On AMD stores follow all waits for scores: these count stores as loads, and the stores depend on branches.
    if (WARP_SIZE == 64)
        UNROLL for (u32 i = 0; i < TILES; ++i) store(i);
}

// Arguments of gdn_chunk_walk.
struct WalkParams {
    half_t* o;
    const ChunkRecord* records;
    const half_t* qkv;
    float* states;
    const i32* cu_q; const i32* read; const i32* write;
    u32 key_heads, value_heads, value_dim, o_stride, qkv_stride;
    u64 slot_stride;
};
// The value columns of a warp: 16 of the block's, which begin at `first_column` of the head.
struct WarpColumns {
    u32 head, first_column, warp;
    bool of_state;  // whether the warp updates the state or computes outputs
};

DEV RowInputs row_inputs(const WalkParams& p, const WarpColumns& at, u32 row) {
    const u32 first = (u32)p.cu_q[row], key_channels = p.key_heads * KEY_DIM, key_head = at.head / (p.value_heads / p.key_heads);
    const half_t* token = p.qkv + (u64)first * p.qkv_stride;
    const half_t* q = token + key_head * KEY_DIM;
    return {q, q + key_channels, token + 2 * key_channels + at.head * p.value_dim + at.first_column,
            p.records + (u64)first_record(p.cu_q, row) * p.value_heads + at.head, p.qkv_stride, p.value_heads,
            (u32)p.cu_q[row + 1] - first};
}

// Computes a row. In turn t, state warps are at chunk t, output warps at chunk t - 1.
DEV void walk_row(WalkShared& s, const WalkParams& p, const WarpColumns& at, u32 row) {
    const RowInputs inputs = row_inputs(p, at, row);
    const u32 chunks = (inputs.tokens + CHUNK - 1) / CHUNK, slot = (u32)p.read[row], slot_after = (u32)p.write[row];
    const u32 column = at.warp * 16, head_column = at.first_column + column;
    const u64 offset = (u64)at.head * KEY_DIM * p.value_dim + head_column;
    half_t* out = p.o + (u64)p.cu_q[row] * p.o_stride + at.head * p.value_dim + head_column;
    TurnCopies copies;
    begin_copies(copies, s, inputs, at.of_state, chunks);
    ColumnState state;
    if (at.of_state) load_state(state, p.states + (u64)(slot == 0 ? 0 : slot - 1) * p.slot_stride + offset, p.value_dim, slot != 0);
    if (at.of_state) wait_for_state(state);
    for (u32 turn = 0; turn <= chunks; ++turn) {
        next_stage(copies, s, inputs, turn, chunks);
        const u32 last = turn - 1;
        if (at.of_state && turn < chunks)
            update_state(state, s.state[turn % STAGES], copies, column, s.exchange[turn % 2][at.warp]);
        if (!at.of_state && turn > 0) {
            chunk_outputs(out + (u64)last * CHUNK * p.o_stride, p.o_stride, s.output[last % STAGES], copies,
                          s.exchange[last % 2][at.warp], inputs.tokens - last * CHUNK);
        }
        load_tiles(copies, inputs, at.of_state, turn + 1, chunks);
    }
    if (at.of_state && slot_after != 0) store_state(p.states + (u64)(slot_after - 1) * p.slot_stride + offset, state, p.value_dim);
    sync();  // The next row begins with the first stage.
}
