// gdn_replay.hip - gated delta nets with draft tokens: the forward pass leaves the states of rows with draft tokens
// unchanged; after sampling, the accepted tokens are applied to them. CPU reference: cpu/state_replay.rs.
//
// gdn_replay_rows    boundaries cu i32 [rows + 1] of the sequences of a step, of which each has all its tokens in its first
//                    row; slots that the forward pass writes, i32 [rows]; first_rows i32 [replays]: the row of each replay
// gdn_replay_inputs  stores the inputs of the state updates of one layer for the first `tokens` tokens of a step:
//                    conv_inputs ACT [tokens, channels], keys_values ACT [tokens, key and value channels], gates f32
//                    [tokens, decay factors | write strengths of the value heads]
// gdn_replay         applies the newest token and the accepted draft tokens of each replay to its states in all layers:
//                    s *= decay; delta = strength * (v - s^T k); s += k delta^T; then the last CONV_WIDTH - 1 inputs
//   facts: i32 [facts, facts_stride], see kernels/src/step/row_facts.rs; stored inputs: layer l has those of token t at
//   row l * stored_tokens + t; latest: LatestToken [sequence slots]. The number of tokens of a replay is the position of
//   the latest token, which the sampler wrote, minus the position of the row's first token.
// Grid: gdn_replay_rows: ceil(rows / bdim()). gdn_replay_inputs: ceil(stored columns / bdim()) x tokens. gdn_replay: (rule
// blocks + ceil(channels / bdim())) x replays x layers; a block updates SLICE value columns of a head.
// Rounding: f32, in the order of gdn_delta_rule, so that the states have the bits of a run without draft tokens.
// Roofline: the states, read and written once, over memory bandwidth.
#include "dev.h"
#include "gdn/state_slice.h"
#include "step/step.h"

// Rows of the facts array; kernels/src/step/row_facts.rs.
enum : u32 { FACT_SEQ_SLOT = 0, FACT_STATE_READ = 2, FACT_STATE_WRITE = 3, FACT_LATER_TOKENS = 4, FACT_REPLAY = 5 };

KERNEL(256)
gdn_replay_rows(i32* cu, i32* write, i32* first_rows, const i32* cu_q, const i32* facts, u32 facts_stride, u32 rows, u32 replays) {
    grid_wait();
    grid_launch_dependents();
    const u32 r = bid_x() * bdim() + tid();
    if (r == 0) cu[0] = 0;
    if (r >= rows) return;
    cu[r + 1] = cu_q[r + 1] + facts[FACT_LATER_TOKENS * facts_stride + r];
    const u32 replay = (u32)facts[FACT_REPLAY * facts_stride + r];
    write[r] = replay == 0 ? facts[FACT_STATE_WRITE * facts_stride + r] : 0;
    if (replay != 0 && replay <= replays) first_rows[replay - 1] = (i32)r;
}
EXPORT(gdn_replay_rows)

KERNEL(256)
gdn_replay_inputs(ACT* conv_inputs, ACT* keys_values, float* gates, const ACT* x, const ACT* qkv, const ACT* beta, const ACT* decay,
                  const float* a_log, const float* dt_bias, u32 channels, u32 key_channels, u32 value_heads, u32 x_stride,
                  u32 qkv_stride, u32 beta_stride, u32 decay_stride) {
    grid_wait();
    grid_launch_dependents();
    const u64 t = bid_y();
    const u32 c = bid_x() * bdim() + tid(), kv_channels = channels - key_channels;
    if (c < channels) {
        conv_inputs[t * channels + c] = x[t * x_stride + c];
    } else if (c < channels + kv_channels) {
        keys_values[t * kv_channels + (c - channels)] = qkv[t * qkv_stride + key_channels + (c - channels)];
    } else if (c < channels + kv_channels + value_heads) {
        const u32 head = c - channels - kv_channels;
        const float rate = decay_rate(a_log[head]), bias = dt_bias[head];
        float* to = gates + t * 2 * value_heads + head;
        to[0] = exp2_(log2_decay(rate, f32(decay[t * decay_stride + head]) + bias));
        to[value_heads] = sigmoid(f32(beta[t * beta_stride + head]));
    }
}
EXPORT(gdn_replay_inputs)

// Tokens and state slots of a replay. Without tokens, no state changes.
struct ReplayRow {
    u32 first;        // index of its first token in the step
    u32 tokens;       // number of tokens to apply
    u32 read, write;  // state slots plus 1; read 0: the state is zero
};

DEV ReplayRow replay_row(const i32* first_rows, const i32* facts, const i32* cu, const i32* positions, const LatestToken* latest,
                         u32 facts_stride, u32 rows, u32 replay) {
    const u32 r = (u32)first_rows[replay];
    if (r >= rows || (u32)facts[FACT_REPLAY * facts_stride + r] != replay + 1) return {0, 0, 0, 0};
    const u32 first = (u32)cu[r];
    const i32 tokens = cu[r + 1] - cu[r], ahead = latest[facts[FACT_SEQ_SLOT * facts_stride + r]].position - positions[first];
    return {first, (u32)(ahead < 0 ? 0 : ahead < tokens ? ahead : tokens), (u32)facts[FACT_STATE_READ * facts_stride + r],
            (u32)facts[FACT_STATE_WRITE * facts_stride + r]};
}

// Writes the last inputs of channel `c` after the tokens of `row`. `inputs` are those of its first token.
DEV void replay_convolution(float* states, const ACT* inputs, const ReplayRow& row, u32 c, u32 channels, u64 slot_stride) {
    enum : u32 { BEFORE = CONV_WIDTH - 1 };
    const float* before = states + (u64)(row.read == 0 ? 0 : row.read - 1) * slot_stride + c;
    float* after = states + (u64)(row.write - 1) * slot_stride + c;
    // Both may be the same slot: every input is read before one is written.
    float last[BEFORE];
    UNROLL for (u32 j = 0; j < BEFORE; ++j) {
        const u32 from = row.tokens + j;  // minus BEFORE: the index of the input in the row
        if (from >= BEFORE) last[j] = f32(inputs[(u64)(from - BEFORE) * channels + c]);
        else last[j] = row.read == 0 ? 0.f : before[(u64)from * channels];
    }
    UNROLL for (u32 j = 0; j < BEFORE; ++j) after[(u64)j * channels] = last[j];
}

// Updates the state by a token: gdn_delta_rule without outputs.
DEV void replay_token(StateSlice& state, const ACT* key, const f32x4& v, const TokenGates& gates, WarpSums<5>& parts) {
    const LaneKeys k = load_keys(key);
    KeySums<5> sums{};  // products of the state with the key, and the sum of squares of the key
    UNROLL for (u32 n = 0; n < LANE_KEYS; ++n) {
        const u32 i = summed_channel(n);
        UNROLL for (u32 j = 0; j < 4; ++j) sums.v[j] = fma_(state.s[i][j], k.v[i], sums.v[j]);
        sums.v[4] = fma_(k.v[i], k.v[i], sums.v[4]);
    }
    add_lanes(sums, parts);
    const float k_scale = key_scale(sums.v[4]);
    float delta[4];
    UNROLL for (u32 j = 0; j < 4; ++j) {
        delta[j] = delta_of(gates, v.v[j], k_scale, sums.v[j]);
        delta[j] *= k_scale;
    }
    update_slice(state, k, delta, gates.shrink);
}

KERNEL(SLICE_WARPS * WARP_SIZE)
gdn_replay(float* states, const ACT* conv_inputs, const ACT* keys_values, const float* gates, const i32* first_rows, const i32* facts,
           const i32* cu, const i32* positions, const u8* latest, u32 facts_stride, u32 rows, u32 stored_tokens, u32 key_heads,
           u32 value_heads, u32 value_dim, u32 rule_blocks, u32 conv_offset, u64 slot_stride, u64 layer_stride) {
    SHARED(WarpSums<5>, parts, 2);
    grid_wait();
    grid_launch_dependents();
    const ReplayRow row =
        replay_row(first_rows, facts, cu, positions, (const LatestToken*)latest, facts_stride, rows, bid_y());
    if (row.tokens == 0 || row.write == 0) return;
    const u32 key_channels = key_heads * KEY_DIM, kv_channels = key_channels + value_heads * value_dim;
    const u64 layer = bid_z(), input = layer * stored_tokens + row.first;
    states += layer * layer_stride;
    if (bid_x() >= rule_blocks) {
        const u32 channels = key_channels + kv_channels, c = (bid_x() - rule_blocks) * bdim() + tid();
        if (c < channels) replay_convolution(states + conv_offset, conv_inputs + input * channels, row, c, channels, slot_stride);
        return;
    }
    const SliceColumns at = slice_columns(bid_x(), value_dim);
    const u32 key_head = at.head / (value_heads / key_heads);
    StateSlice state;
    const float* before = states + (u64)(row.read == 0 ? 0 : row.read - 1) * slot_stride + state_offset(at, value_dim);
    load_slice(state, before, value_dim, row.read != 0 && at.present);
    const ACT* token = keys_values + input * kv_channels;
    const float* gate = gates + input * 2 * value_heads + at.head;
    for (u32 t = 0; t < row.tokens; ++t, token += kv_channels, gate += 2 * value_heads) {
        f32x4 v = {{0.f, 0.f, 0.f, 0.f}};
        if (at.present) v = load4(token + key_channels + at.head * value_dim + at.column);
        replay_token(state, token + key_head * KEY_DIM, v, {gate[0], gate[value_heads]}, parts[t % 2]);
    }
    if (!at.present) return;
    store_slice(states + (u64)(row.write - 1) * slot_stride + state_offset(at, value_dim), state, value_dim);
}
EXPORT(gdn_replay)
