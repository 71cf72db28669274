// gdn.hip - gated delta net: causal convolution and gated delta rule with recurrent state. CPU reference:
// cpu/recurrent.rs.
//
// gdn_conv        y[t, c] = silu(sum over j of w[j, c] * x[t - (CONV_WIDTH - 1) + j, c]) within the row of t; inputs
//                 before the row are those of its convolution state. Rows of one token also write their state.
// gdn_conv_state  writes the last CONV_WIDTH - 1 inputs of each row of several tokens to its convolution state
// gdn_delta_rule  for each token of a row and each value head, with state s f32 [KEY_DIM, value_dim]:
//                 s *= decay; delta = beta * (v - s^T k); s += k delta^T; o = s^T q
//   x [tokens, at least channels], y [tokens, channels], o [tokens, value_heads * value_dim] of ACT; w f32
//   [CONV_WIDTH, channels]; beta, decay [tokens, value_heads] of ACT; a_log, dt_bias f32 [value_heads]; cu_q i32
//   [rows + 1]; read, write i32 [rows]: state slot plus 1, or 0: none. Convolution states are f32 [CONV_WIDTH - 1,
//   channels], oldest first. Tokens from cu_q[rows] on are padding; their outputs are 0.
// Grid: gdn_conv: ceil(channels / bdim()) x ceil(tokens / chunk), a thread computes `chunk` tokens of a channel.
// gdn_conv_state: ceil(channels / bdim()) x rows. gdn_delta_rule: a warp computes SLICE value columns of a head of a
// row: ceil(value_heads * value_dim / SLICE / warps per block) x (rows + 1); the last y computes padding tokens.
// Rounding: f32 throughout, rounded once at the store of y and o. Sums over keys: KEY_LANES lanes, each in ascending
// order, then a tree, so that the result of a row does not depend on other rows or on how a prompt is divided.
// Roofline: one token per row: the state, read and written once, over memory bandwidth. Many tokens per row: bound by
// the latency of a token (a chain of products and one tree of sums) times the tokens of the longest row.
#include "dev.h"
#include "attention/row_of.h"
#include "gdn/gates.h"

KERNEL(256)
gdn_conv(ACT* y, const ACT* x, const float* w, float* states, const i32* cu_q, const i32* read, const i32* write, u32 rows,
         u32 tokens, u32 channels, u32 y_stride, u32 x_stride, u32 chunk, u64 slot_stride) {
    enum : u32 { BEFORE = CONV_WIDTH - 1 };
    grid_wait();
    grid_launch_dependents();
    const u32 c = bid_x() * bdim() + tid();
    const u32 first = bid_y() * chunk, end = first + chunk < tokens ? first + chunk : tokens;
    if (c >= channels) return;
    float weight[CONV_WIDTH];
    UNROLL for (u32 j = 0; j < CONV_WIDTH; ++j) weight[j] = w[(u64)j * channels + c];
    float last[BEFORE];  // the inputs before token t, oldest first
    const u32 padding = (u32)cu_q[rows];
    u32 row_end = 0;
    for (u32 t = first; t < end; ++t) {
        if (t >= padding) {
            y[(u64)t * y_stride + c] = to<ACT>(0.f);
            continue;
        }
        u32 row_len = 0, slot_after = 0;
        if (t == first || t >= row_end) {
            const u32 row = row_of(cu_q, rows, t), row_first = (u32)cu_q[row];
            const u32 slot = (u32)read[row];
            row_end = (u32)cu_q[row + 1];
            row_len = row_end - row_first;
            slot_after = (u32)write[row];
            const float* state = states + (u64)(slot == 0 ? 0 : slot - 1) * slot_stride + c;
            UNROLL for (u32 j = 0; j < BEFORE; ++j) {
                const u32 from = t + j;  // plus BEFORE: the token of the input
                if (from >= row_first + BEFORE) last[j] = f32(x[(u64)(from - BEFORE) * x_stride + c]);
                else last[j] = slot == 0 ? 0.f : state[(u64)(from - row_first) * channels];
            }
        }
        const float now = f32(x[(u64)t * x_stride + c]);
        float sum = 0.f;
        UNROLL for (u32 j = 0; j < BEFORE; ++j) sum = fma_(weight[j], last[j], sum);
        sum = fma_(weight[BEFORE], now, sum);
        UNROLL for (u32 j = 0; j + 1 < BEFORE; ++j) last[j] = last[j + 1];
        last[BEFORE - 1] = now;
        y[(u64)t * y_stride + c] = to<ACT>(sum * sigmoid(sum));
        if (row_len == 1 && slot_after != 0) {
            float* state = states + (u64)(slot_after - 1) * slot_stride + c;
            UNROLL for (u32 j = 0; j < BEFORE; ++j) state[(u64)j * channels] = last[j];
        }
    }
}
EXPORT(gdn_conv)

KERNEL(256)
gdn_conv_state(const ACT* x, float* states, const i32* cu_q, const i32* read, const i32* write, u32 channels, u32 x_stride,
               u64 slot_stride) {
    enum : u32 { BEFORE = CONV_WIDTH - 1 };
    grid_wait();
    grid_launch_dependents();
    const u32 c = bid_x() * bdim() + tid(), row = bid_y();
    const u32 first = (u32)cu_q[row], len = (u32)cu_q[row + 1] - first;
    const u32 slot = (u32)read[row], slot_after = (u32)write[row];
    if (c >= channels || len <= 1 || slot_after == 0) return;
    const float* before = states + (u64)(slot == 0 ? 0 : slot - 1) * slot_stride + c;
    float* after = states + (u64)(slot_after - 1) * slot_stride + c;
    // Both may be the same slot: every input is read before one is written.
    float last[BEFORE];
    UNROLL for (u32 j = 0; j < BEFORE; ++j) {
        const u32 from = len + j;  // minus BEFORE: the index of the input in the row
        if (from >= BEFORE) last[j] = f32(x[(u64)(first + from - BEFORE) * x_stride + c]);
        else last[j] = slot == 0 ? 0.f : before[(u64)from * channels];
    }
    UNROLL for (u32 j = 0; j < BEFORE; ++j) after[(u64)j * channels] = last[j];
}
EXPORT(gdn_conv_state)

enum : u32 {
    SLICE = 8,                           // value columns of a warp
    QUADS = SLICE / 4,                   // groups of lanes, each with four value columns
    KEY_LANES = WARP_SIZE / QUADS,       // lanes over which the key channels are divided
    LANE_KEYS = KEY_DIM / KEY_LANES,     // key channels of a lane
    RULE_WARPS = 4                       // warps of a block
};

// Inputs of a token as one lane reads them.
struct RuleInputs {
    float q[LANE_KEYS], k[LANE_KEYS], v[4];
    float beta, decay;
};

KERNEL(RULE_WARPS * WARP_SIZE)
gdn_delta_rule(ACT* o, const ACT* qkv, const ACT* beta, const ACT* decay, const float* a_log, const float* dt_bias,
               float* states, const i32* cu_q, const i32* read, const i32* write, u32 rows, u32 tokens, u32 key_heads,
               u32 value_heads, u32 value_dim, u32 o_stride, u32 qkv_stride, u32 beta_stride, u32 decay_stride,
               u64 slot_stride) {
    grid_wait();
    grid_launch_dependents();
    const u32 slices = value_dim / SLICE, unit = bid_x() * RULE_WARPS + warp_id(), row = bid_y();
    if (unit >= slices * value_heads) return;
    const u32 head = unit / slices, key_head = head / (value_heads / key_heads);
    const u32 key_lane = lane() % KEY_LANES, column = unit % slices * SLICE + lane() / KEY_LANES * 4;
    ACT* out = o + head * value_dim + column;
    if (row == rows) {
        for (u32 t = (u32)cu_q[rows] + key_lane; t < tokens; t += KEY_LANES)
            UNROLL for (u32 i = 0; i < 4; ++i) out[(u64)t * o_stride + i] = to<ACT>(0.f);
        return;
    }
    const u32 first = (u32)cu_q[row], end = (u32)cu_q[row + 1];
    if (first >= end) return;
    const u32 slot = (u32)read[row], slot_after = (u32)write[row];
    const u64 offset = (u64)head * KEY_DIM * value_dim + column;
    float s[LANE_KEYS][4];
    const float* before = states + (u64)(slot == 0 ? 0 : slot - 1) * slot_stride + offset;
    UNROLL for (u32 i = 0; i < LANE_KEYS; ++i) {
        f32x4 from = {{0.f, 0.f, 0.f, 0.f}};
        if (slot != 0) from = *(const f32x4*)(before + (u64)(i * KEY_LANES + key_lane) * value_dim);
        UNROLL for (u32 j = 0; j < 4; ++j) s[i][j] = from.v[j];
    }
    const float rate = exp2_(1.44269504f * a_log[head]), bias = dt_bias[head];
    const u32 key_channels = key_heads * KEY_DIM, key = key_head * KEY_DIM + key_lane;
    const auto load = [=](u32 t) {
        RuleInputs in;
        const ACT* token = qkv + (u64)t * qkv_stride;
        UNROLL for (u32 i = 0; i < LANE_KEYS; ++i) {
            in.q[i] = f32(token[key + i * KEY_LANES]);
            in.k[i] = f32(token[key_channels + key + i * KEY_LANES]);
        }
        UNROLL for (u32 j = 0; j < 4; ++j) in.v[j] = f32(token[2 * key_channels + head * value_dim + column + j]);
        in.beta = f32(beta[(u64)t * beta_stride + head]);
        in.decay = f32(decay[(u64)t * decay_stride + head]);
        return in;
    };
    RuleInputs next = load(first);
    for (u32 t = first; t < end; ++t) {
        const RuleInputs in = next;
        if (t + 1 < end) next = load(t + 1);
        // Sums over the key channels: state times key and query, and products of key and query.
        float sk[4] = {0.f, 0.f, 0.f, 0.f}, sq[4] = {0.f, 0.f, 0.f, 0.f}, kk = 0.f, qq = 0.f, kq = 0.f;
        UNROLL for (u32 i = 0; i < LANE_KEYS; ++i) {
            UNROLL for (u32 j = 0; j < 4; ++j) {
                sk[j] = fma_(s[i][j], in.k[i], sk[j]);
                sq[j] = fma_(s[i][j], in.q[i], sq[j]);
            }
            kk = fma_(in.k[i], in.k[i], kk);
            qq = fma_(in.q[i], in.q[i], qq);
            kq = fma_(in.k[i], in.q[i], kq);
        }
        UNROLL for (u32 j = 0; j < 4; ++j) {
            sk[j] = group_sum<KEY_LANES>(sk[j]);
            sq[j] = group_sum<KEY_LANES>(sq[j]);
        }
        kk = group_sum<KEY_LANES>(kk);
        qq = group_sum<KEY_LANES>(qq);
        kq = group_sum<KEY_LANES>(kq);
        const float k_scale = rsqrt_(kk + 1e-6f), q_scale = rsqrt_(qq + 1e-6f) * rsqrt_((float)KEY_DIM);
        const float shrink = exp2_(-1.44269504f * rate * softplus(in.decay + bias)), strength = sigmoid(in.beta);
        float delta[4];
        UNROLL for (u32 j = 0; j < 4; ++j) {
            delta[j] = strength * (in.v[j] - shrink * k_scale * sk[j]);
            const float value = q_scale * fma_(shrink, sq[j], k_scale * kq * delta[j]);
            if (key_lane == 0) out[(u64)t * o_stride + j] = to<ACT>(value);
            delta[j] *= k_scale;
        }
        UNROLL for (u32 i = 0; i < LANE_KEYS; ++i)
            UNROLL for (u32 j = 0; j < 4; ++j) s[i][j] = fma_(in.k[i], delta[j], shrink * s[i][j]);
    }
    if (slot_after == 0) return;
    float* after = states + (u64)(slot_after - 1) * slot_stride + offset;
    UNROLL for (u32 i = 0; i < LANE_KEYS; ++i) {
        const f32x4 to_state = {{s[i][0], s[i][1], s[i][2], s[i][3]}};
        *(f32x4*)(after + (u64)(i * KEY_LANES + key_lane) * value_dim) = to_state;
    }
}
EXPORT(gdn_delta_rule)
