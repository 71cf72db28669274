// draft.hip - data movement around the MTP module of a model. The MTP module computes a position from that
// position's token and from the hidden state of the previous position. CPU reference: cpu/draft.rs. StagedDraftRow
// (step/step.h) describes a row of the step and where its previous hidden state is stored. Token positions
// are read from the step's positions, step_positions i32 [tokens], not from StagedDraftRow, because those of some
// rows are known only on the device (in the sequence slot).
//
// prepare_draft_pass      lays out draft pass `pass`, with one token for each of the first `count` rows that
//                         has more than `pass` draft tokens: the row's newest token in pass 0, else the draft
//                         token of the previous pass. Outputs: ids, positions i32 [count], slots i64 [count],
//                         cu_q i32 [count + 1], context_lens, row_seq_slots i32 [count]. All other rows are
//                         padding, as in prepare_step. Grid: blocks of 256 over rows.
// gather_draft_inputs     y [n, hidden_size]: for each token, the hidden state of the previous position.
//                         first_tokens = 1: y[i] belongs to the first token of row i. first_tokens = 0: y[t]
//                         belongs to token t of the step; for tokens after the first one of their row the
//                         state comes from hidden [tokens, hidden_size]. Grid: (rows, blocks per row).
// store_draft_states      copies hidden states of a step, hidden [tokens, hidden_size]: those of each row's
//                         newest tokens to its sequence slot, and those at the last positions of blocks to
//                         boundary_states. Grid: (rows, blocks per row).
// draft_argmax            y[i] = the lowest id with the largest of the logits f32 [n, vocab]; an arbitrary id
//                         for a row of NaNs. Grid: n. Block: 1024.
// draft_shard_candidates  draft_argmax over a rank's `ids` ids from `begin` on (vocab-parallel). It writes
//                         words [n, 2]: the upper and the lower word of the sort key (sort_key_of in
//                         sample/order.h) of the id with the largest logit. Grid and block as draft_argmax.
// draft_shard_merge      y[i] = the id with the largest logit, from the words [ranks, n, 2] of all ranks.
//                        Grid: blocks of 256 over rows.
// map_draft_ids          y[i] = target_ids[y[i]], in place on y i32 [count]: maps ids of the draft vocabulary
//                        to the target vocabulary. Grid: blocks of 256 over rows.
// insert_drafts           writes draft tokens to the ids of the step, and to the token histories of the
//                         sequence slots. Grid: blocks of 256 over rows.
//
// Arguments: drafts i32 [passes, draft_stride]. slot_states [sequence slots, states_per_slot, hidden_size];
// the first state of a slot is that of position first_positions i32 [sequence slots]. boundary_states
// [blocks, hidden_size]. States are copied as 16-bit words. The host has checked the indices in the stage
// buffer. Rows beyond those of the stage buffer are padding.
// Roofline: bound by latency, except draft_argmax, which is bound by reading its row at the bandwidth of one
// block.
#include "dev.h"
#include "prepare/prepare.h"
#include "sample/order.h"

// Number of logits loads that each thread has in flight.
enum : u32 { AHEAD = 8 };

DEV const StagedDraftRow* drafts_of(const u8* stage) { return (const StagedDraftRow*)(stage + header_of(stage)->drafts_at); }

// Buffers of hidden states: those of the newest tokens of each sequence slot, and that of the last position
// of each KV block. A state has `bytes` bytes.
struct HiddenStateBuffers {
    u8 *slot_states, *boundary_states;
    i32* first_positions;
    u32 states_per_slot, bytes;
};

template <class V> DEV void copy_as(u8* to, const u8* from, u32 bytes) {
    const u32 first = tid() * (u32)sizeof(V), step = bdim() * (u32)sizeof(V);
    if (from) {
        for (u32 at = first; at < bytes; at += step) *(V*)(to + at) = *(const V*)(from + at);
    } else {
        for (u32 at = first; at < bytes; at += step) *(V*)(to + at) = V{};
    }
}
DEV void copy_state(u8* to, const u8* from, u32 bytes) {
    const u64 unaligned = ((u64)to | (u64)from | bytes) & 15;
    if (unaligned == 0) copy_as<u32x4>(to, from, bytes);
    else copy_as<u16>(to, from, bytes);
}

// Returns the address of the hidden state of position start - 1, where `start` is the position of the first
// token of the row; null if no such state is stored, in which case zeros are used.
DEV const u8* preceding_state(const HiddenStateBuffers& states, const StagedDraftRow& row, i32 start) {
    if (row.boundary_block >= 0) return states.boundary_states + (u64)row.boundary_block * states.bytes;
    if (!row.state_in_slot) return nullptr;
    const i32 offset = start - 1 - states.first_positions[row.seq_slot], last = (i32)states.states_per_slot - 1;
    const u32 within = (u32)(offset < 0 ? 0 : offset > last ? last : offset);  // The host cannot check it.
    return states.slot_states + ((u64)row.seq_slot * states.states_per_slot + within) * states.bytes;
}

KERNEL(256)
prepare_draft_pass(i32* ids, i32* positions, i64* slots, i32* cu_q, i32* context_lens, i32* row_seq_slots, const i32* step_ids,
                   const i32* step_positions, const i32* drafts, const i32* tables, const u8* stage, u32 count, u32 pass, u32 draft_stride, u32 table_width,
                   u32 block_tokens) {
    grid_wait();
    grid_launch_dependents();
    const u32 r = bid_x() * bdim() + tid();
    if (r == 0) cu_q[0] = 0;
    if (r >= count) return;
    const StagedDraftRow* row = drafts_of(stage) + r;
    const bool staged = r < header_of(stage)->drafts;
    const bool valid = staged && pass < (u32)row->drafts;
    const i32 seq_slot = staged ? row->seq_slot : 0, newest = valid ? row->len - 1 : 0;
    const u32 position = valid ? (u32)(step_positions[row->token] + newest) + pass : 0;
    const i32* table = tables + (u64)seq_slot * table_width;
    i32 id = 0;
    if (valid) id = pass == 0 ? step_ids[row->token + newest] : drafts[(u64)(pass - 1) * draft_stride + r];
    ids[r] = id;
    positions[r] = valid ? (i32)position : 0;
    slots[r] = valid ? (i64)table[position / block_tokens] * block_tokens + position % block_tokens : -1;
    context_lens[r] = valid ? (i32)position + 1 : 0;
    row_seq_slots[r] = seq_slot;
    cu_q[r + 1] = (i32)r + 1;
}
EXPORT(prepare_draft_pass)

KERNEL(256)
gather_draft_inputs(u8* y, const u8* hidden, u8* slot_states, u8* boundary_states, i32* first_positions,
                    const i32* step_positions, const u8* stage, u32 first_tokens, u32 states_per_slot, u32 bytes) {
    grid_wait();
    grid_launch_dependents();
    const u32 r = bid_x();
    if (r >= header_of(stage)->drafts) return;
    const StagedDraftRow& row = drafts_of(stage)[r];
    const HiddenStateBuffers states{slot_states, boundary_states, first_positions, states_per_slot, bytes};
    const i32 start = step_positions[row.token];
    if (first_tokens) {
        if (bid_y() == 0) copy_state(y + (u64)r * bytes, preceding_state(states, row, start), bytes);
        return;
    }
    for (u32 i = bid_y(); i < (u32)(row.len + row.drafts); i += gdim_y()) {
        const u64 t = (u64)row.token + i;
        copy_state(y + t * bytes, i == 0 ? preceding_state(states, row, start) : hidden + (t - 1) * bytes, bytes);
    }
}
EXPORT(gather_draft_inputs)

KERNEL(256)
store_draft_states(u8* slot_states, u8* boundary_states, i32* first_positions, const u8* hidden,
                   const i32* step_positions, const i32* tables, const u8* stage, u32 states_per_slot, u32 bytes, u32 table_width, u32 block_tokens) {
    grid_wait();
    grid_launch_dependents();
    const u32 r = bid_x();
    if (r >= header_of(stage)->drafts) return;
    const StagedDraftRow& row = drafts_of(stage)[r];
    const HiddenStateBuffers states{slot_states, boundary_states, first_positions, states_per_slot, bytes};
    const i32* table = tables + (u64)row.seq_slot * table_width;
    const i32 start = step_positions[row.token];
    const u32 tokens = (u32)(row.len + row.drafts), last = (u32)row.len - 1;
    if (bid_y() == 0) {
        u8* to = slot_states + (u64)row.seq_slot * states_per_slot * bytes;
        // Stores to the sequence slot the hidden state of the token before the newest token, then the states
        // of the newest token and of the draft tokens. The first state may be read from the memory that the
        // later states overwrite: each thread copies the same channels of every state, in order.
        const i32 newest = start + (i32)last;
        if (newest > 0) {
            const u8* preceding = last == 0 ? preceding_state(states, row, start) : hidden + ((u64)row.token + last - 1) * bytes;
            copy_state(to, preceding, bytes);
            to += bytes;
        }
        for (u32 i = last; i < tokens; ++i, to += bytes) copy_state(to, hidden + ((u64)row.token + i) * bytes, bytes);
        sync();  // Other threads may still read the old states and position.
        if (tid() == 0) first_positions[row.seq_slot] = newest > 0 ? newest - 1 : 0;
    }
    for (u32 i = bid_y(); i < tokens; i += gdim_y()) {
        const u32 position = (u32)start + i;
        if ((position + 1) % block_tokens != 0) continue;
        copy_state(boundary_states + (u64)table[position / block_tokens] * bytes, hidden + ((u64)row.token + i) * bytes, bytes);
    }
}
EXPORT(store_draft_states)

// Returns the sort key (sort_key_of in sample/order.h) of the largest logit of `row`. The row has the logits
// of token ids [begin, begin + ids). Every thread of the block must call it.
DEV u64 first_of_row(const float* row, u32 begin, u32 ids) {
    u64 best = 0;
    for (u32 first = tid(); first < ids; first += bdim() * AHEAD) {
        float x[AHEAD];
        UNROLL for (u32 i = 0; i < AHEAD; ++i) {
            const u32 id = first + i * bdim();
            x[i] = id < ids ? row[id] : 0.f;
        }
        UNROLL for (u32 i = 0; i < AHEAD; ++i) {
            const u32 id = first + i * bdim();
            const u64 sort_key = id < ids ? sort_key_of(x[i], begin + id) : 0;
            best = sort_key > best ? sort_key : best;
        }
    }
    return block_max_key(best);
}

KERNEL(1024) draft_argmax(i32* y, const float* logits, u32 vocab, u32 stride) {
    grid_wait();
    grid_launch_dependents();
    const u64 best = first_of_row(logits + (u64)bid_x() * stride, 0, vocab);
    if (tid() == 0) y[bid_x()] = (i32)id_of(best);
}
EXPORT(draft_argmax)

KERNEL(1024) draft_shard_candidates(u32* candidates, const float* logits, u32 begin, u32 ids, u32 stride) {
    grid_wait();
    grid_launch_dependents();
    const u64 best = first_of_row(logits + (u64)bid_x() * stride, begin, ids);
    if (tid() != 0) return;
    candidates[bid_x() * 2] = (u32)(best >> 32);
    candidates[bid_x() * 2 + 1] = (u32)best;
}
EXPORT(draft_shard_candidates)

KERNEL(256) draft_shard_merge(i32* y, const u32* candidates, u32 count, u32 ranks) {
    grid_wait();
    grid_launch_dependents();
    const u32 r = bid_x() * bdim() + tid();
    if (r >= count) return;
    u64 best = 0;
    for (u32 rank = 0; rank < ranks; ++rank) {
        const u32* words = candidates + ((u64)rank * count + r) * 2;
        const u64 sort_key = (u64)words[0] << 32 | words[1];
        best = sort_key > best ? sort_key : best;
    }
    y[r] = (i32)id_of(best);
}
EXPORT(draft_shard_merge)

KERNEL(256) map_draft_ids(i32* y, const i32* target_ids, u32 count) {
    grid_wait();
    grid_launch_dependents();
    const u32 r = bid_x() * bdim() + tid();
    if (r < count) y[r] = target_ids[y[r]];
}
EXPORT(map_draft_ids)

KERNEL(256)
insert_drafts(i32* ids, i32* history, const i32* step_positions, const i32* drafts, const u8* stage, u32 count, u32 draft_stride,
              u32 history_len) {
    grid_wait();
    grid_launch_dependents();
    const u32 r = bid_x() * bdim() + tid();
    if (r >= count || r >= header_of(stage)->drafts) return;
    const StagedDraftRow& row = drafts_of(stage)[r];
    const u32 end = (u32)(step_positions[row.token] + row.len);
    for (u32 i = 0; i < (u32)row.drafts; ++i) {
        const i32 id = drafts[(u64)i * draft_stride + r];
        const u32 position = end + i;
        ids[row.token + row.len + i] = id;
        if (position < history_len) history[(u64)row.seq_slot * history_len + position] = id;
    }
}
EXPORT(insert_drafts)
