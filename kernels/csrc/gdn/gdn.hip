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
//   channels], oldest first. Tokens from cu_q[rows] on are padding; their outputs are 0. Channels and row strides of x and
//   y are multiples of 8; x, y, w and states are aligned to 16 bytes.
// Grid: gdn_conv: ceil(channels / 8 / bdim()) x ceil(tokens / chunk), a thread computes `chunk` (1 or CONV_CHUNK) tokens of
// eight channels. gdn_conv_state: ceil(channels / 8 / bdim()) x rows. gdn_delta_rule: a block computes SLICE value columns
// of a head of a row: value_heads * ceil(value_dim / SLICE) x (rows + 1); the last y computes padding tokens. Rows of more
// than `max_tokens` tokens are left to gdn_chunk.hip.
// Rounding: f32 throughout, rounded once at the store of y and o. Sums over keys: gdn/state_slice.h.
// Roofline: gdn_conv: bytes of x and y over memory bandwidth. gdn_delta_rule: one token per row: the state, read and
// written once, over memory bandwidth. Several tokens per row: bound by the latency of a token (a chain of products and one
// sum over a block).
#include "dev.h"
#include "attention/row_of.h"
#include "gdn/state_slice.h"

enum : u32 {
    BEFORE = CONV_WIDTH - 1,  // inputs of a convolution state
    CHANNELS = 8,             // channels of a thread
    CONV_CHUNK = 8,           // tokens of a thread if rows have several tokens
};

// Arguments of a convolution.
struct ConvStep {
    ACT* y; const ACT* x; const float* w;
    float* states;
    const i32* cu_q; const i32* read; const i32* write;
    u32 rows, tokens, channels, y_stride, x_stride;
    u64 slot_stride;
};

// Eight inputs as they are stored: they wait in few registers.
#if ACT_F32
typedef f32x8 RawInputs;
DEV RawInputs load_raw(const float* p) { return load8(p); }
DEV f32x8 widen(const f32x8& x) { return x; }
#else
typedef half_x8 RawInputs;
DEV RawInputs load_raw(const half_t* p) { return *(const half_x8*)p; }
#endif

// Returns input `j` of the BEFORE inputs before token `t` of a row that begins at token `first`, for CHANNELS channels:
// a token of the row, or a row of its convolution state `state` (null: zero).
DEV f32x8 input_before(const ConvStep& in, const float* state, u32 c, u32 first, u32 t, u32 j) {
    const u32 from = t + j;  // plus BEFORE: the token of the input
    if (from >= first + BEFORE) return load8(in.x + (u64)(from - BEFORE) * in.x_stride + c);
    return state ? load8(state + (u64)(from - first) * in.channels) : f32x8{};
}

DEV const float* state_of(const ConvStep& in, u32 slot, u32 c) {
    return slot == 0 ? nullptr : in.states + (u64)(slot - 1) * in.slot_stride + c;
}
DEV void store_state(const ConvStep& in, u32 slot, u32 c, const f32x8* inputs) {
    float* state = in.states + (u64)(slot - 1) * in.slot_stride + c;
    UNROLL for (u32 j = 0; j < BEFORE; ++j) store8(state + (u64)j * in.channels, inputs[j]);
}

// Computes the outputs of CHANNELS channels from `c` on, for at most TOKENS tokens from `first` on. All inputs of the tokens
// are loaded before the first output is stored.
template <u32 TOKENS> DEV void convolve(const ConvStep& in, u32 c, u32 first) {
    RawInputs raw[TOKENS];
    UNROLL for (u32 i = 0; i < TOKENS; ++i)
        if (first + i < in.tokens) raw[i] = load_raw(in.x + (u64)(first + i) * in.x_stride + c);
    f32x8 weight[CONV_WIDTH];
    UNROLL for (u32 j = 0; j < CONV_WIDTH; ++j) weight[j] = load8(in.w + (u64)j * in.channels + c);
    f32x8 last[BEFORE];  // the inputs before token t, oldest first
    const u32 padding = (u32)in.cu_q[in.rows];
    u32 row_end = 0, row_len = 0, slot_after = 0;
    UNROLL for (u32 i = 0; i < TOKENS; ++i) {
        const u32 t = first + i;
        if (t >= in.tokens) break;
        ACT* to = in.y + (u64)t * in.y_stride + c;
        if (t >= padding) {
            store8(to, f32x8{});
            continue;
        }
        if (i == 0 || t >= row_end) {
            const u32 row = row_of(in.cu_q, in.rows, t), row_first = (u32)in.cu_q[row];
            row_end = (u32)in.cu_q[row + 1];
            row_len = row_end - row_first;
            slot_after = (u32)in.write[row];
            const float* state = state_of(in, (u32)in.read[row], c);
            UNROLL for (u32 j = 0; j < BEFORE; ++j) last[j] = input_before(in, state, c, row_first, t, j);
        }
        const f32x8 now = widen(raw[i]);
        f32x8 out;
        UNROLL for (u32 n = 0; n < CHANNELS; ++n) {
            float sum = 0.f;
            UNROLL for (u32 j = 0; j < BEFORE; ++j) sum = fma_(weight[j].v[n], last[j].v[n], sum);
            sum = fma_(weight[BEFORE].v[n], now.v[n], sum);
            out.v[n] = sum * sigmoid(sum);
        }
        store8(to, out);
        UNROLL for (u32 j = 0; j + 1 < BEFORE; ++j) last[j] = last[j + 1];
        last[BEFORE - 1] = now;
        if (row_len == 1 && slot_after != 0) store_state(in, slot_after, c, last);
    }
}

KERNEL(128)
gdn_conv(ACT* y, const ACT* x, const float* w, float* states, const i32* cu_q, const i32* read, const i32* write, u32 rows,
         u32 tokens, u32 channels, u32 y_stride, u32 x_stride, u32 chunk, u64 slot_stride) {
    grid_wait();
    grid_launch_dependents();
    const ConvStep in = {y, x, w, states, cu_q, read, write, rows, tokens, channels, y_stride, x_stride, slot_stride};
    const u32 c = (bid_x() * bdim() + tid()) * CHANNELS;
    if (c >= channels) return;
    if (chunk == 1) convolve<1>(in, c, bid_y());
    else convolve<CONV_CHUNK>(in, c, bid_y() * CONV_CHUNK);
}
EXPORT(gdn_conv)

KERNEL(128)
gdn_conv_state(const ACT* x, float* states, const i32* cu_q, const i32* read, const i32* write, u32 channels, u32 x_stride,
               u64 slot_stride) {
    grid_wait();
    grid_launch_dependents();
    const u32 c = (bid_x() * bdim() + tid()) * CHANNELS, row = bid_y();
    const u32 first = (u32)cu_q[row], end = (u32)cu_q[row + 1];
    const u32 slot_after = (u32)write[row];
    if (c >= channels || end - first <= 1 || slot_after == 0) return;
    const ConvStep in = {nullptr, x, nullptr, states, cu_q, read, write, 0, 0, channels, 0, x_stride, slot_stride};
    const float* state = state_of(in, (u32)read[row], c);
    // Both may be the same slot: every input is read before one is written.
    f32x8 last[BEFORE];
    UNROLL for (u32 j = 0; j < BEFORE; ++j) last[j] = input_before(in, state, c, first, end, j);
    store_state(in, slot_after, c, last);
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
