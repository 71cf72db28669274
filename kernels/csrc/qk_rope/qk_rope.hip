// qk_rope.hip - q/k norm, RoPE and the KV write, between the QKV projection and attention.
// CPU reference: cpu/qk_rope.rs.
//
// qk_norm_rope_kv_write  q [tokens, heads * D] = rope(norm(query heads)), D = HEAD_DIM. rope(norm(key heads))
// and the value heads are written to the token's slot of the KV pool; slot < 0 stores nothing.
//   qkv [tokens, (heads + 2 kv_heads) * D] of ACT; q_norm, k_norm [D] of ACT, f32 with
//   -DNORM_F32=1, or null (no norm)
//   cos, sin f32 [positions, ROTARY_DIM / 2]; positions i32 [tokens]; slots i64 [tokens]
//   kv: KV pool of one layer, [block][kv head][K tile | V tile], tile [BLOCK_TOKENS][D] of ACT, or fp8 e4m3
//   head_factors f32 [heads + 2 kv_heads], with -DKV_FP8=1: factors of the query, key and value heads; or null
// Defines: -DHEAD_DIM, -DROTARY_DIM, -DBLOCK_TOKENS, -DACT_F32, -DKV_FP8.
// Grid: tokens * (heads + 2 kv_heads) groups of GROUP lanes, 128 threads per block.
// Rounding points: qk_rope.h; fp8 keys and values are rounded to ACT first, then divided by their scale and rounded;
// queries with a factor are rounded to ACT before and after it.
// Roofline: twice the bytes of qkv over memory bandwidth; a single token is bound by the latency of two
// dependent loads and a reduction over GROUP lanes.
#include "dev.h"
#include "qk_rope/qk_rope.h"

#if KV_FP8
typedef fp8 KV;
#define HEAD_FACTORS , const float* head_factors
#define STORE_FACTOR(common) (head_factors != nullptr ? head_factor : (common))
#else
typedef ACT KV;
#define HEAD_FACTORS
#define STORE_FACTOR(common) (common)
#endif

// Arguments whose names end in `stride` are in elements. key_factor and value_factor are the reciprocals of
// the fp8 scales of the keys and values of the layer, for launches without head_factors.
KERNEL(128)
qk_norm_rope_kv_write(ACT* q, KV* kv, const ACT* qkv, const NORM_WEIGHT* q_norm, const NORM_WEIGHT* k_norm, const float* cos,
                      const float* sin, const i32* positions, const i64* slots, u32 tokens, u32 heads, u32 kv_heads,
                      u32 q_stride, u32 qkv_stride, float eps, float key_factor, float value_factor HEAD_FACTORS) {
    grid_launch_dependents();  // Called first, so that decode attention prefetches old keys during the projections.
    grid_wait();
    const u32 all = heads + 2 * kv_heads, member = tid() % GROUP;
    const u32 unit = bid_x() * (bdim() / GROUP) + tid() / GROUP;
    const bool valid = unit < tokens * all;  // The other lanes take part in their warp's reductions too.
    const u32 token = valid ? unit / all : 0, head = valid ? unit % all : 0;
    const bool is_query = head < heads, is_value = head >= heads + kv_heads;
    const i64 slot = valid && !is_query ? slots[token] : 0;
#if KV_FP8
    const float head_factor = head_factors != nullptr ? head_factors[head] : 1.f;
#endif

    // Issue all loads before the first use.
    LaneHeadChannels part = load_head(qkv + (u64)token * qkv_stride + head * HEAD_DIM, member), rotation = {};
    if (!is_value) {
        const u64 row = (u64)positions[token] * HALF;
        rotation = load_rotation(cos + row, sin + row, member);
    }
    if (q_norm != nullptr || k_norm != nullptr) {
        const NORM_WEIGHT* w = is_query ? q_norm : is_value ? nullptr : k_norm;
        LaneHeadChannels unit_part = part;
        norm_head(unit_part, load_head(w != nullptr ? w : (q_norm != nullptr ? q_norm : k_norm), member), eps, member);
        if (w != nullptr) part = unit_part;
    }
    if (!is_value) rope_head(part, rotation, member);
    if (!valid) return;
    if (is_query) {
        store_head(q + (u64)token * q_stride + head * HEAD_DIM, part, member, STORE_FACTOR(1.f));
    } else if (slot >= 0) {
        const u64 block = (u64)slot / BLOCK_TOKENS, row = (u64)slot % BLOCK_TOKENS;
        const u32 kv_head = head - heads - (is_value ? kv_heads : 0);
        const u64 tile = (block * kv_heads + kv_head) * 2 + (is_value ? 1 : 0);
        KV* to_row = kv + (tile * BLOCK_TOKENS + row) * HEAD_DIM;
        store_head(to_row, part, member, STORE_FACTOR(is_value ? value_factor : key_factor));
    }
}
EXPORT(qk_norm_rope_kv_write)
