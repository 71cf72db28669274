// one_shot_all_reduce.hip - one-shot (custom) all-reduce over ranks that are GPUs of one host, for matrices
// small enough to be latency-bound.
// Protocol: peer_exchange.h. Sums are f32, in the order of ranks, from 0 on, and rounded to ACT once. CPU
// reference: none, because CPU ranks use another protocol (collectives/src/shared_memory_group.rs).
//
// one_shot_all_reduce       x = sum of x over the ranks, in place. x: `count` elements of ACT, no alignment
//                           required
// one_shot_all_reduce_norm x += sum of delta over the ranks, then y = rms_norm(x). The sum over ranks and x
//                          are each rounded, so that the bits are those of one_shot_all_reduce followed by
//                          add_rms_norm. Rows have a multiple of 8 columns, at most 16 per thread, and are
//                          aligned to 16 bytes
// -DRANKS=2..8 number of ranks   -DNORM_F32=1 f32 weights of the norm (norm/norm.h)
// Grid: at most the number of SMs. Block of one_shot_all_reduce_norm: that of add_rms_norm, which depends
// only on cols.
// Roofline: bound by latency (load, one trip over the link, reduce, store). Between two H200 it takes 3.1 to
// 3.7 us for up to 128 KiB, 4.6 us for 256 KiB, 9.6 us for 1 MiB, where NCCL takes 6.2 to 8.0, 9.3 and 15.4
// us.
#include "dev.h"
#include "norm/norm.h"
#include "norm/row.h"
#include "one_shot_all_reduce/peer_exchange.h"

KERNEL(256)
one_shot_all_reduce(ACT* x, const PeerMemoryPointers memory, LaunchCounter* counted, const u32* abort_word,
                    u64 area_bytes, u32 rank, u32 count) {
    grid_launch_dependents();
    grid_wait();
    const u32 eights = (count + 7) / 8, first = bid_x() * bdim() + tid(), step = gdim_x() * bdim();
    const bool aligned = ((u64)x & 15) == 0;
    AllReduceLaunch l = begin_launch(memory, counted, abort_word, area_bytes, rank, eights);
    const auto load = [=](u32 i) {
        const u32 here = count - 8 * i;
        return aligned && here >= 8 ? load_group(x + 8 * i) : load_partial_group(x + 8 * i, here);
    };
    for (u32 i = first; i < eights; i += step) publish_to_peers(l, i, load(i));
    for (u32 i = first; i < eights; i += step) {
        const u32 index[1] = {i};
        const ElementGroup own[1] = {load(i)};
        f32x8 sum[1];
        sum_of_ranks(l, index, own, sum);
        const u32 here = count - 8 * i;
        if (aligned && here >= 8)
            store8(x + 8 * i, sum[0]);
        else
            for (u32 e = 0; e < 8; ++e)
                if (e < here) x[8 * i + e] = to<ACT>(sum[0].v[e]);
    }
    end_launch(l);
}
EXPORT(one_shot_all_reduce)

// Source of the values that norm_in_registers() adds to x: the sum of `delta` over the ranks, rounded to ACT.
// `row`: the row of `delta` of this rank with index `number`.
struct RankSumSource {
    AllReduceLaunch* launch;
    const ACT* row;
    u32 number, eights;
};
template <u32 PIECES> DEV void fill(f32x8 (&sums)[PIECES], const RankSumSource& of) {
    u32 index[PIECES];
    ElementGroup own[PIECES];
    UNROLL for (u32 p = 0; p < PIECES; ++p) {
        const u32 e = p * bdim() + tid();
        index[p] = e < of.eights ? of.number * of.eights + e : NO_GROUP;
        if (e < of.eights) own[p] = load_group(of.row + e * 8);
    }
    sum_of_ranks(*of.launch, index, own, sums);
    UNROLL for (u32 p = 0; p < PIECES; ++p)
        for (u32 i = 0; i < 8; ++i) sums[p].v[i] = f32(to<ACT>(sums[p].v[i]));
}

// Arguments whose names end in `stride` are in elements.
KERNEL(512)
one_shot_all_reduce_norm(ACT* y, ACT* x, const ACT* delta, const NORM_WEIGHT* w, const PeerMemoryPointers memory,
                         LaunchCounter* counted, const u32* abort_word, u64 area_bytes, u32 rank, u32 rows, u32 cols,
                         u32 y_stride, u32 x_stride, u32 delta_stride, float eps) {
    grid_launch_dependents();
    grid_wait();
    const u32 row_eights = cols / 8;
    AllReduceLaunch l = begin_launch(memory, counted, abort_word, area_bytes, rank, rows * row_eights);
    for (u32 row = bid_x(); row < rows; row += gdim_x())
        for (u32 e = tid(); e < row_eights; e += bdim())
            publish_to_peers(l, row * row_eights + e, load_group(delta + (u64)row * delta_stride + e * 8));
    for (u32 row = bid_x(); row < rows; row += gdim_x()) {
        const RankSumSource summed{&l, delta + (u64)row * delta_stride, row, row_eights};
        const auto put = [&](u32 c, const f32x8& v) {
            if (c < cols) store8(y + (u64)row * y_stride + c, v);
        };
        ACT* stream = x + (u64)row * x_stride;
        norm_in_registers<2, true>(stream, w, cols, eps, summed, put);
    }
    end_launch(l);
}
EXPORT(one_shot_all_reduce_norm)
