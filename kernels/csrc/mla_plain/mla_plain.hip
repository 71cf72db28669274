// mla_plain: MLA of any shape, absorbed, reference kernel: a block absorbs the query of one token and head
// with W_UK, reads every row of the pool once for scores and values, and applies W_UV to the average. Not
// optimised: each block reads the head's matrices. CPU reference: cpu/mla.
//
// o [T, heads * VALUE]; q [T, heads * (UNTURNED + ROTARY)], RoPE applied; pool: one layer, [slot][LATENT +
// ROTARY];
// key (W_UK) [heads][UNTURNED][LATENT], value (W_UV) [heads][VALUE][LATENT], all of ACT. Rows as in
// attention_plain.
// Positions are processed KEYS at a time from 0: a result depends only on the keys attended to. Rows of
// context 0 write zeros. The first `unseen` positions are masked, and no query is at one of them.
//
//   -DACT_F32=0|1  -DLATENT=n -DROTARY=n -DUNTURNED=n -DVALUE=n (even; LATENT at most 1024)  -DBLOCK_TOKENS=n
// Grid: (T, heads). Block: 256.
// Rounding: the output only; all sums are f32.
#include "dev.h"
#include "attention/row_of.h"

enum : u32 { WIDTH = LATENT + ROTARY, QUERY = UNTURNED + ROTARY, THREADS = 256, KEYS = 64,
             OWN = (LATENT + THREADS - 1) / THREADS };

// query [LATENT + ROTARY] = factor * [Wᵀ q_nope | q_rope], W [UNTURNED, LATENT].
DEV void absorb_query(float* query, const ACT* q, const ACT* w, float factor) {
    for (u32 c = tid(); c < LATENT; c += THREADS) {
        float sum = 0.f;
        for (u32 m = 0; m < UNTURNED; ++m) sum = fma_(f32(w[m * LATENT + c]), f32(q[m]), sum);
        query[c] = sum * factor;
    }
    for (u32 i = tid(); i < ROTARY; i += THREADS) query[LATENT + i] = f32(q[UNTURNED + i]) * factor;
    sync();
}

// y [VALUE] = W x, W [VALUE, LATENT]: one warp per output.
DEV void project_values(ACT* y, const float* x, const ACT* w) {
    for (u32 v = warp_id(); v < VALUE; v += THREADS / WARP_SIZE) {
        float sum = 0.f;
        for (u32 c = lane(); c < LATENT; c += WARP_SIZE) sum = fma_(f32(w[(u64)v * LATENT + c]), x[c], sum);
        sum = warp_sum(sum);
        if (lane() == 0) y[v] = to<ACT>(sum);
    }
}

KERNEL(256) mla_plain(ACT* o, const ACT* q, const ACT* pool, const ACT* key, const ACT* value, const i32* cu_q,
                      const i32* context_lens, const i32* tables, const i32* table_rows, u32 rows, u32 table_width,
                      u32 q_stride, u32 o_stride, u32 unseen, float factor) {
    SHARED(float, query, WIDTH);
    SHARED(float, scores, KEYS);
    grid_wait();
    const u32 head = bid_y(), token = bid_x(), row = row_of(cu_q, rows, token);
    const u32 seen = keys_seen(cu_q, context_lens, row, token);
    const i32* table = tables + (u64)(table_rows ? (u32)table_rows[row] : row) * table_width;
    const auto at = [&](u32 position) {
        const u64 block = (u32)table[position / BLOCK_TOKENS];
        return pool + (block * BLOCK_TOKENS + position % BLOCK_TOKENS) * WIDTH;
    };
    absorb_query(query, q + (u64)token * q_stride + head * QUERY, key + (u64)head * UNTURNED * LATENT, factor);

    float max = -1e30f, sum = 0.f, mean[OWN];
    for (u32 i = 0; i < OWN; ++i) mean[i] = 0.f;
    for (u32 first = 0; first < seen; first += KEYS) {
        const u32 keys = seen - first < KEYS ? seen - first : KEYS;
        for (u32 j = warp_id(); j < KEYS; j += THREADS / WARP_SIZE) {
            float s = 0.f;
            if (j < keys) {
                const ACT* latent = at(first + j);
                for (u32 d = lane(); d < WIDTH; d += WARP_SIZE) s = fma_(query[d], f32(latent[d]), s);
            }
            s = warp_sum(s);
            if (lane() == 0) scores[j] = j < keys && first + j >= unseen ? s : -1e30f;
        }
        sync();
        float grown = max;
        for (u32 j = 0; j < keys; ++j) grown = fmax_(grown, scores[j]);
        const float shrink = exp2_(max - grown);
        max = grown;
        sum *= shrink;
        for (u32 i = 0; i < OWN; ++i) mean[i] *= shrink;
        for (u32 j = 0; j < keys; ++j) {
            const float p = exp2_(scores[j] - max);
            const ACT* latent = at(first + j);
            sum += p;
            for (u32 i = 0; i < OWN; ++i) {
                const u32 c = i * THREADS + tid();
                if (c < LATENT) mean[i] = fma_(p, f32(latent[c]), mean[i]);
            }
        }
        sync();  // The next keys' scores overwrite these.
    }
    const float scale = seen ? 1.f / sum : 0.f;
    for (u32 i = 0; i < OWN; ++i) {
        const u32 c = i * THREADS + tid();
        if (c < LATENT) query[c] = mean[i] * scale;
    }
    sync();
    project_values(o + (u64)token * o_stride + head * VALUE, query, value + (u64)head * VALUE * LATENT);
}
EXPORT(mla_plain)
