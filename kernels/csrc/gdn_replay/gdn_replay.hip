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
// blocks + ceil(channels / bdim())) x replays x layers; a warp updates SLICE value columns of a head.
// Rounding: f32, in the order of gdn_delta_rule, so that the states have the bits of a run without draft tokens.
// Roofline: the states, read and written once, over memory bandwidth.
#include "dev.h"
#include "gdn/gates.h"
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
        const float rate = exp2_(1.44269504f * a_log[head]), bias = dt_bias[head];
        float* to = gates + t * 2 * value_heads + head;
        to[0] = exp2_(-1.44269504f * rate * softplus(f32(decay[t * decay_stride + head]) + bias));
        to[value_heads] = sigmoid(f32(beta[t * beta_stride + head]));
    }
}
EXPORT(gdn_replay_inputs)

enum : u32 {
    SLICE = 8,                           // value columns of a warp
    QUADS = SLICE / 4,                   // groups of lanes, each with four value columns
    KEY_LANES = WARP_SIZE / QUADS,       // lanes over which the key channels are divided
    LANE_KEYS = KEY_DIM / KEY_LANES,     // key channels of a lane
    REPLAY_WARPS = 4                     // warps of a block
};

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

KERNEL(REPLAY_WARPS * WARP_SIZE)
gdn_replay(float* states, const ACT* conv_inputs, const ACT* keys_values, const float* gates, const i32* first_rows, const i32* facts,
           const i32* cu, const i32* positions, const u8* latest, u32 facts_stride, u32 rows, u32 stored_tokens, u32 key_heads,
           u32 value_heads, u32 value_dim, u32 rule_blocks, u32 conv_offset, u64 slot_stride, u64 layer_stride) {
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
    const u32 slices = value_dim / SLICE, unit = bid_x() * REPLAY_WARPS + warp_id();
    if (unit >= slices * value_heads) return;
    const u32 head = unit / slices, key_head = head / (value_heads / key_heads);
    const u32 key_lane = lane() % KEY_LANES, column = unit % slices * SLICE + lane() / KEY_LANES * 4;
    const u64 offset = (u64)head * KEY_DIM * value_dim + column;
    float s[LANE_KEYS][4];
    const float* before = states + (u64)(row.read == 0 ? 0 : row.read - 1) * slot_stride + offset;
    UNROLL for (u32 i = 0; i < LANE_KEYS; ++i) {
        f32x4 from = {{0.f, 0.f, 0.f, 0.f}};
        if (row.read != 0) from = *(const f32x4*)(before + (u64)(i * KEY_LANES + key_lane) * value_dim);
        UNROLL for (u32 j = 0; j < 4; ++j) s[i][j] = from.v[j];
    }
    const ACT* token = keys_values + input * kv_channels;
    const float* gate = gates + input * 2 * value_heads + head;
    for (u32 t = 0; t < row.tokens; ++t, token += kv_channels, gate += 2 * value_heads) {
        float k[LANE_KEYS], sk[4] = {0.f, 0.f, 0.f, 0.f}, kk = 0.f;
        UNROLL for (u32 i = 0; i < LANE_KEYS; ++i) {
            k[i] = f32(token[key_head * KEY_DIM + key_lane + i * KEY_LANES]);
            UNROLL for (u32 j = 0; j < 4; ++j) sk[j] = fma_(s[i][j], k[i], sk[j]);
            kk = fma_(k[i], k[i], kk);
        }
        UNROLL for (u32 j = 0; j < 4; ++j) sk[j] = group_sum<KEY_LANES>(sk[j]);
        kk = group_sum<KEY_LANES>(kk);
        const float k_scale = rsqrt_(kk + 1e-6f), shrink = gate[0], strength = gate[value_heads];
        float delta[4];
        UNROLL for (u32 j = 0; j < 4; ++j) {
            const float v = f32(token[key_channels + head * value_dim + column + j]);
            delta[j] = strength * (v - shrink * k_scale * sk[j]);
            delta[j] *= k_scale;
        }
        UNROLL for (u32 i = 0; i < LANE_KEYS; ++i)
            UNROLL for (u32 j = 0; j < 4; ++j) s[i][j] = fma_(k[i], delta[j], shrink * s[i][j]);
    }
    float* after = states + (u64)(row.write - 1) * slot_stride + offset;
    UNROLL for (u32 i = 0; i < LANE_KEYS; ++i) {
        const f32x4 to_state = {{s[i][0], s[i][1], s[i][2], s[i][3]}};
        *(f32x4*)(after + (u64)(i * KEY_LANES + key_lane) * value_dim) = to_state;
    }
}
EXPORT(gdn_replay)
