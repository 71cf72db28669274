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
// gdn_conv_state: ceil(channels / bdim()) x rows. gdn_delta_rule: a block computes SLICE value columns of a head of a row:
// value_heads * ceil(value_dim / SLICE) x (rows + 1); the last y computes padding tokens. Rows of more than `max_tokens`
// tokens are left to gdn_chunk.hip.
// Rounding: f32 throughout, rounded once at the store of y and o. Sums over keys: gdn/state_slice.h.
// Roofline: one token per row: the state, read and written once, over memory bandwidth. Several tokens per row: bound by
// the latency of a token (a chain of products and one sum over a block).
#include "dev.h"
#include "attention/row_of.h"
#include "gdn/state_slice.h"

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

// Inputs of a token as one lane reads them.
struct RuleInputs {
    LaneKeys q, k;
    f32x4 v;
    float beta, decay;
};

// Inputs of a value head.
struct HeadInputs {
    const ACT* q; const ACT* k; const ACT* v;
    const ACT* beta; const ACT* decay;
    u32 stride, beta_stride, decay_stride;
    bool present;
};
DEV RuleInputs load_inputs(const HeadInputs& head, u32 t) {
    const u64 at = (u64)t * head.stride;
    RuleInputs in;
    in.q = load_keys(head.q + at);
    in.k = load_keys(head.k + at);
    in.v = {{0.f, 0.f, 0.f, 0.f}};
    if (head.present) in.v = load4(head.v + at);
    in.beta = f32(head.beta[(u64)t * head.beta_stride]);
    in.decay = f32(head.decay[(u64)t * head.decay_stride]);
    return in;
}

// Updates the state by a token and returns its outputs.
DEV f32x4 apply_token(StateSlice& state, const RuleInputs& in, float rate, float bias, WarpSums<11>& parts) {
    // Products of the state with key (0 to 3) and query (4 to 7), and of key and query: kk, qq, kq.
    KeySums<11> sums{};
    UNROLL for (u32 n = 0; n < LANE_KEYS; ++n) {
        const u32 i = summed_channel(n);
        UNROLL for (u32 j = 0; j < 4; ++j) {
            sums.v[j] = fma_(state.s[i][j], in.k.v[i], sums.v[j]);
            sums.v[4 + j] = fma_(state.s[i][j], in.q.v[i], sums.v[4 + j]);
        }
        sums.v[8] = fma_(in.k.v[i], in.k.v[i], sums.v[8]);
        sums.v[9] = fma_(in.q.v[i], in.q.v[i], sums.v[9]);
        sums.v[10] = fma_(in.k.v[i], in.q.v[i], sums.v[10]);
    }
    add_lanes(sums, parts);
    const float k_scale = key_scale(sums.v[8]), q_scale = key_scale(sums.v[9]) * rsqrt_((float)KEY_DIM);
    const TokenGates gates = {exp2_(log2_decay(rate, in.decay + bias)), sigmoid(in.beta)};
    float delta[4];
    f32x4 out;
    UNROLL for (u32 j = 0; j < 4; ++j) {
        delta[j] = delta_of(gates, in.v.v[j], k_scale, sums.v[j]);
        out.v[j] = q_scale * fma_(gates.shrink, sums.v[4 + j], k_scale * sums.v[10] * delta[j]);
        delta[j] *= k_scale;
    }
    update_slice(state, in.k, delta, gates.shrink);
    return out;
}

KERNEL(SLICE_WARPS * WARP_SIZE)
gdn_delta_rule(ACT* o, const ACT* qkv, const ACT* beta, const ACT* decay, const float* a_log, const float* dt_bias,
               float* states, const i32* cu_q, const i32* read, const i32* write, u32 rows, u32 tokens, u32 max_tokens,
               u32 key_heads, u32 value_heads, u32 value_dim, u32 o_stride, u32 qkv_stride, u32 beta_stride,
               u32 decay_stride, u64 slot_stride) {
    SHARED(WarpSums<11>, parts, 2);
    grid_wait();
    grid_launch_dependents();
    const SliceColumns at = slice_columns(bid_x(), value_dim);
    const u32 row = bid_y(), head = at.head, key_head = head / (value_heads / key_heads);
    ACT* out = o + head * value_dim + at.column;
    if (row == rows) {
        if (!at.present) return;
        for (u32 t = (u32)cu_q[rows] + key_lane(); t < tokens; t += KEY_LANES)
            store4(out + (u64)t * o_stride, {{0.f, 0.f, 0.f, 0.f}});
        return;
    }
    const u32 first = (u32)cu_q[row], end = (u32)cu_q[row + 1];
    if (first >= end || end - first > max_tokens) return;
    const u32 slot = (u32)read[row], slot_after = (u32)write[row], key_channels = key_heads * KEY_DIM;
    const ACT* q = qkv + key_head * KEY_DIM;
    const HeadInputs inputs = {q, q + key_channels, qkv + 2 * key_channels + head * value_dim + at.column, beta + head,
                               decay + head, qkv_stride, beta_stride, decay_stride, at.present};
    RuleInputs in = load_inputs(inputs, first);
    StateSlice state;
    const float* before = states + (u64)(slot == 0 ? 0 : slot - 1) * slot_stride + state_offset(at, value_dim);
    load_slice(state, before, value_dim, slot != 0 && at.present);
    const float rate = decay_rate(a_log[head]), bias = dt_bias[head];
    for (u32 t = first; t < end; ++t) {
        const f32x4 value = apply_token(state, in, rate, bias, parts[(t - first) % 2]);
        if (key_lane() == 0 && at.present) store4(out + (u64)t * o_stride, value);
        if (t + 1 < end) in = load_inputs(inputs, t + 1);
    }
    if (slot_after == 0 || !at.present) return;
    store_slice(states + (u64)(slot_after - 1) * slot_stride + state_offset(at, value_dim), state, value_dim);
}
EXPORT(gdn_delta_rule)
