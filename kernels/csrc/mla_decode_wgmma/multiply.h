// mla_decode_wgmma/multiply.h - the two consumer warpgroups. The first warpgroup (template argument SCORES)
// computes the probabilities of a step, and passes them to the second warpgroup through shared memory,
// together with the factors by which the sums of earlier steps must be multiplied.
#pragma once

// Shared memory in which the first warpgroup passes one factor per query row to the second: the rescale
// factors of a step, or at the end of a context with a single split the final scale.
DEV float* published_scales() { SHARED(float, factors, TILE); return factors; }
DEV void publish_scales(const float (&of_heads)[2]) {
    if (lane() % 4 != 0) return;
    UNROLL for (u32 slot = 0; slot < 2; ++slot) published_scales()[wgmma_row(slot * 2)] = of_heads[slot];
}
DEV void read_scales(float (&of_heads)[2]) { UNROLL for (u32 slot = 0; slot < 2; ++slot) of_heads[slot] = published_scales()[wgmma_row(slot * 2)]; }

DEV void rescale_outputs(float (&o)[SUMS], const float (&rescale)[2]) {
    // Most steps do not raise the maximum of any query row; then every factor is 1, and the multiplication is
    // skipped.
    if (warp_any(rescale[0] != 1.f || rescale[1] != 1.f))
        UNROLL for (u32 i = 0; i < SUMS; ++i) o[i] *= rescale[i >> 1 & 1];
}

DEV void start_scores(float (&s)[KEYS / 2], const u8* queries, const u8* keys) {
    const KMajorOperand q = warp_uniform(by_k(queries)), k = warp_uniform(by_k(keys));
    wgmma_fence_operand(s);
    wgmma_fence();
    UNROLL for (u32 i = 0; i < WIDTH / 16; ++i) {
        const u32 at = i / 4 * PANEL_BYTES + i % 4 * 32;
        wgmma<KEYS>(s, advanced(q, at), advanced(k, at), i != 0);
    }
    wgmma_commit();
}

// Starts the WGMMAs that add to `o` (or, if `add` is false, store in it) the products of probabilities and KV
// rows of a step, for the channels of this warpgroup. operand(i) returns the probabilities of keys [16 i, 16
// i + 16) of the step.
template <class Operand> DEV void start_sums(float (&o)[SUMS], const Operand& operand, const u8* keys, bool add) {
    const NMajorOperand compressed_kv = warp_uniform(by_n(keys + first_channel() / 64 * PANEL_BYTES, PANEL_BYTES));
    wgmma_fence_operand(o);
    wgmma_fence();
    UNROLL for (u32 i = 0; i < KEYS / 16; ++i) wgmma<HALF>(o, operand(i), advanced(compressed_kv, i * 16 * 128), add || i != 0);
    wgmma_commit();
}

// Number of steps processed so far, and number of query loads processed so far; the index of the next
// pipeline stage and the parity of its phase are computed from these numbers.
struct ConsumerState { u32 step, tokens; };
DEV u32 stage_of(u32 step) { return step % STAGES; }

DEV const u8* step_keys(const SharedMemoryLayout& shared, u32 step) {
    return shared.keys + stage_of(step) * OPERAND_BYTES;
}
DEV const u8* await_keys(const SharedMemoryLayout& shared, PipelineBarriers* m, u32 step) {
    barrier_wait(&m->keys_full[stage_of(step)], step / STAGES & 1);
    return step_keys(shared, step);
}

// Waits until the second warpgroup has read the probabilities of the previous step, then writes the
// probabilities and rescale factors of this step to shared memory for it.
DEV void publish_weights(const SharedMemoryLayout& shared, PipelineBarriers* m, u32 step,
                         const ProbabilityFragment<KEYS / 2>& p, const float (&rescale)[2]) {
    barrier_wait(&m->weights_empty, ~step & 1);
    // The index of a 16-byte vector in a panel row can be xored into the offset afterwards, because
    // panel_offset() xors it into bits that are zero in `row * 128`.
    const u32 begin = opaque(panel_offset(wgmma_row(0), 0) + wgmma_col(0) * 2);
    UNROLL for (u32 i = 0; i < KEYS / 4; ++i) {
        const u32 piece = i / 2, lower = i % 2 * 8 * 128;
        *(u32*)(shared.weights + lower + (begin ^ piece * 16)) = p.v[i / 4][i % 4];
    }
    publish_scales(rescale);
    release_written(&m->weights_full);
}

// Replaces the scores of keys [at, at + KEYS) by probabilities, for a step in which not every query row
// attends to all keys: keys from `end` on do not exist, and for each token the keys of later tokens are
// masked.
DEV void masked_softmax(float (&s)[KEYS / 2], SoftmaxRowState& r, float (&rescale)[2], const MlaDecodeParams& job,
                        const SplitCursor& p, u32 at, u32 end) {
    u32 seen[2];
    UNROLL for (u32 slot = 0; slot < 2; ++slot)
        seen[slot] = keys_seen_by(p, query_of(wgmma_row(slot * 2), p, job.to).token, at, end);
    online_softmax<true>(s, r, rescale, seen, job.factor);
}

// Loop of the first warpgroup over the steps of a split that has keys. Probabilities stay in registers. The
// score WGMMAs of the next step are issued after the accumulation WGMMAs of this step, so that two pipeline
// stages are enough. There is no loop end or exit between issuing the score WGMMAs and waiting for them:
// otherwise ptxas serialises the WGMMAs, and the loop takes 1.5 times as long.
DEV void score_and_add(float (&o)[SUMS], SoftmaxRowState& r, const MlaDecodeParams& job,
                       const SharedMemoryLayout& shared, PipelineBarriers* m, ConsumerState& w, const SplitCursor& p) {
    float s[KEYS / 2], rescale[2];
    ProbabilityFragment<KEYS / 2> weights;
    const u32 first = first_key(p), end = end_key(p);
    u32 at = first;
    const auto start_step = [&] {
        pack(weights, s);
        if (at != first) rescale_outputs(o, rescale);
        start_sums(o, [&](u32 i) -> const u32(&)[4] { return weights.v[i]; }, step_keys(shared, w.step), at != first);
        publish_weights(shared, m, w.step, weights, rescale);
    };
    const auto next_scores = [&] {
        start_scores(s, shared.queries, await_keys(shared, m, w.step + 1));
        wgmma_wait<1>();
        wgmma_fence_operand(o);
        release(&m->keys_empty[stage_of(w.step++)]);
        wgmma_wait<0>();
        wgmma_fence_operand(s);
    };
    start_scores(s, shared.queries, await_keys(shared, m, w.step));
    wgmma_wait<0>();
    wgmma_fence_operand(s);
    // Every query row attends to all keys of a step, except in the last step, or in the last two steps if
    // several tokens are processed together.
    for (; end - at > KEYS && at + KEYS + p.count <= end + 1; at += KEYS) {
        const u32 all[2] = {KEYS, KEYS};
        online_softmax<false>(s, r, rescale, all, job.factor);
        start_step();
        next_scores();
    }
    for (; end - at > KEYS; at += KEYS) {
        masked_softmax(s, r, rescale, job, p, at, end);
        start_step();
        next_scores();
    }
    masked_softmax(s, r, rescale, job, p, at, end);
    start_step();
    wgmma_wait<0>();
    wgmma_fence_operand(o);
    release(&m->keys_empty[stage_of(w.step++)]);
}

// Loop of the second warpgroup over the steps of a split: accumulates the second half of the output channels,
// with the probabilities that the first warpgroup has computed.
DEV void add(float (&o)[SUMS], const SharedMemoryLayout& shared, PipelineBarriers* m, ConsumerState& w,
             const SplitCursor& p) {
    const u32 first = first_key(p), end = end_key(p);
    for (u32 at = first; at < end; at += KEYS) {
        const u8* keys = await_keys(shared, m, w.step);
        barrier_wait(&m->weights_full, w.step & 1);
        if (at != first) {
            float rescale[2];
            read_scales(rescale);
            rescale_outputs(o, rescale);
        }
        const KMajorOperand weights = warp_uniform(by_k(shared.weights));
        start_sums(o, [&](u32 i) { return advanced(weights, i * 32); }, keys, at != first);
        wgmma_wait<0>();
        wgmma_fence_operand(o);
        release(&m->weights_empty);
        release(&m->keys_empty[stage_of(w.step++)]);
    }
}

// Stores the result of a split. Every thread of both consumer warpgroups must call it.
template <bool SCORES> DEV void put(const float (&o)[SUMS], const SoftmaxRowState& r, const MlaDecodeParams& job,
                                    const SplitCursor& p) {
    float max[2]{}, sum[2]{}, scale[2];
    if (SCORES) UNROLL for (u32 slot = 0; slot < 2; ++slot) {
        max[slot] = r.max[slot] * job.factor;
        sum[slot] = group_sum<4>(r.sum[slot]);
        scale[slot] = 1.f / sum[slot];
    }
    if (p.splits > 1) {
        const f32x2 stats[2] = {{{max[0], sum[0]}}, {{max[1], sum[1]}}};
        return store_record(o, p, job.to, SCORES ? stats : nullptr);
    }
    team_sync();  // Until here the second warpgroup reads the last step's factors.
    if (SCORES) publish_scales(scale);
    team_sync();
    if (!SCORES) read_scales(scale);
    store_outputs(o, p, job.to, scale);
    team_sync();
}

// Processes a split and stores its result. SCORES: true in the first consumer warpgroup (which computes the
// scores), false in the second.
template <bool SCORES>
DEV void multiply_split(const MlaDecodeParams& job, const SharedMemoryLayout& shared, PipelineBarriers* m,
                        ConsumerState& w, const SplitCursor& p) {
    float o[SUMS];
    SoftmaxRowState r{{NO_SCORE, NO_SCORE}, {0.f, 0.f}};
    if (SCORES) score_and_add(o, r, job, shared, m, w, p);
    else add(o, shared, m, w, p);
    put<SCORES>(o, r, job, p);
}

// Writes zeros to the outputs of the padding rows, which follow the last row with keys. `with_keys`: number
// of rows up to that row.
DEV void store_padding(const MlaDecodeParams& job, u32 with_keys) {
    for (u32 row = with_keys + bid_x(); row < job.rows.rows; row += gdim_x()) {
        SplitCursor p{};
        p.row = row;
        p.token = (u32)job.rows.cu_q[row];
        p.count = 1;
        store_zeros(p, job.to);
    }
}

DEV void multiply(const MlaDecodeParams& job, const SharedMemoryLayout& shared, PipelineBarriers* m, SplitCursor p) {
    const bool scores = warp_id() < WARPS / 2;
    ConsumerState w{};
    u32 done = 0;  // number of splits of the current heads that are done
    while (p.left != 0) {
        if (scores && done == 0) barrier_wait(&m->queries_full, w.tokens++ & 1);
        if (p.context == 0) store_zeros(p, job.to);
        else if (scores) multiply_split<true>(job, shared, m, w, p);
        else multiply_split<false>(job, shared, m, w, p);
        ++done;
        const bool last_split = p.left == 1 || p.split + 1 == p.splits;
        if (scores && last_split) release(&m->queries_empty);
        if (last_split && p.splits > 1 && is_last(job.to.arrived + unit_of(p), done, p.splits)) merge_splits(p, job.to);
        if (last_split) done = 0;
        advance_cursor(p, job.rows);
    }
}
