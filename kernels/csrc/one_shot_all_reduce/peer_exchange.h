// one_shot_all_reduce/peer_exchange.h - one-shot all-reduce: exchange between ranks through peer memory, and the
// reduction of its data.
//
// Each of -DRANKS=2..8 ranks is a GPU that can write to the memory of all others. A rank writes its
// contribution to the memory of every other rank, and sums what the others have written to its own memory.
// This takes one trip over the link, without an acknowledgement. Sums are in f32, from 0 on, in the order of
// ranks, so that all ranks have the same bits.
//
// Memory of a rank: two halves, each with one area per rank. The launches of a group are numbered from 1 on;
// launch n uses half n % 2. Four bytes of data and the number of the launch form one 8-byte word, which is
// written atomically, so that a rank that reads the expected number has also read the data. There is no flag
// after the data and no fence. A flag after the data would require a fence, which waits for a round trip over
// the link.
//
// Two halves are sufficient. Rank A writes to the same half of B's memory in launches n and n + 2. Before
// launch n + 2, A's launch n + 1 has ended, in which A read what B wrote in B's launch n + 1. B's launch
// n + 1 began after B's launch n had ended, so B had finished reading the half. Kernels write only after
// grid_wait(), so that no kernel writes while the previous kernel reads.
//
// The number is in device memory and each launch increments it, so a captured graph can be replayed any
// number of times. It skips 0, the value of new memory, and wraps from 2^32 - 1 to 2, so that the halves
// continue to alternate.
// A server wraps around within days, so a word left from the same number of the previous cycle must not be
// mistaken for new data: the last launch of a cycle with each half clears that half at its end. By then this
// rank's blocks have observed all ranks' writes to that half, and have read them; a rank that writes to it
// next has first read this rank's contribution to the following launch, which this rank sends after clearing.
//
// Blocks wait for contributions of other ranks' blocks, so that all blocks of a launch must be resident at
// the same time: a grid has at most as many blocks as the device has SMs, and each block writes all its
// contributions before it waits. A waiting thread polls a word of host memory periodically: once it is not 0,
// all waits are aborted, and the results are undefined.
#pragma once
#include "dev/peer.h"

enum : u32 {
    OTHERS = RANKS - 1,
    PAIRS = sizeof(ACT),  // pairs of 8-byte words per eight elements
    // Maximum number of pairs (two 8-byte words) of each other rank that a thread polls at a time.
    MAX_POLLED_PAIRS = OTHERS == 1 ? 8 : OTHERS == 2 ? 4 : OTHERS <= 4 ? 4 / PAIRS : 1,
    ABORT_POLL_INTERVAL = 1024,  // polls of peer data per poll of the host's abort word
    NO_GROUP = ~0u
};

// Address of the exchange memory of this rank, and mapped addresses of that of the other ranks, in order of
// ranks.
struct PeerMemoryPointers { u8 *own, *of[OTHERS]; };
// Number of launches so far; number of finished blocks of the current launch.
struct LaunchCounter { u32 launch, left; };

// State of a launch; every thread has a copy.
struct AllReduceLaunch {
    PeerMemoryPointers memory;
    LaunchCounter* count;
    const u32* abort_word;
    u64 area_bytes;
    u32 rank, eights, number, polls;  // `eights`: groups of eight elements in the whole matrix
    bool aborted;                     // the launch is aborted: no further waits
};

// Eight adjacent matrix elements, unconverted, as 32-bit words.
struct ElementGroup { u32 words[2 * PAIRS]; };

// Returns the state of a new launch. Called after grid_wait().
DEV AllReduceLaunch begin_launch(const PeerMemoryPointers& memory, LaunchCounter* count, const u32* abort_word,
                                 u64 area_bytes, u32 rank, u32 eights) {
    const u32 last = count->launch;
    return AllReduceLaunch{memory, count, abort_word, area_bytes, rank, eights, last == ~0u ? 2 : last + 1, 0, false};
}

// Clears the half of the exchange memory of this rank that the launch has used. A single thread does this,
// because it is rare: it takes a few milliseconds every few days.
DEV void clear_half(const AllReduceLaunch& l) {
    const u64 half_bytes = RANKS * l.area_bytes;
    u64x2* half = (u64x2*)(l.memory.own + (l.number & 1) * half_bytes);
    for (u64 i = 0; i < half_bytes / sizeof(u64x2); ++i) store_peer(half + i, {{0, 0}});
    fence_peers();
}

// Counts this block as finished; the last block to finish updates the launch counter. Every thread of the
// block must call it after its last read of exchange memory.
DEV void end_launch(const AllReduceLaunch& l) {
    sync();
    if (tid() != 0 || atomic_add_acq_rel(&l.count->left, 1) + 1 != gdim_x()) return;
    if (l.number >= ~0u - 1) clear_half(l);
    l.count->left = 0;
    l.count->launch = l.number;
}

// Returns the address in `memory`, the exchange memory of a rank, to which rank `from` writes pair `pair`
// (two 8-byte words) of element group i (eight elements).
DEV u64x2* slot_address(const AllReduceLaunch& l, u8* memory, u32 from, u32 pair, u32 i) {
    u8* area = memory + ((l.number & 1) * RANKS + from) * l.area_bytes;
    return (u64x2*)area + (u64)pair * l.eights + i;
}

DEV u64 word(u32 data, u32 number) { return (u64)number << 32 | data; }

DEV void publish_to_peers(const AllReduceLaunch& l, u32 i, const ElementGroup& x) {
    UNROLL for (u32 to = 0; to < OTHERS; ++to)
        UNROLL for (u32 p = 0; p < PAIRS; ++p)
            store_peer(slot_address(l, l.memory.of[to], l.rank, p, i),
                       {{word(x.words[2 * p], l.number), word(x.words[2 * p + 1], l.number)}});
}

DEV bool is_aborted(AllReduceLaunch& l) {
    peer_pause();
    if (++l.polls % ABORT_POLL_INTERVAL == 0) l.aborted = l.aborted || load_host(l.abort_word) != 0;
    return l.aborted;
}

// Adds the matrix elements in the words w0 and w1 to the f32 sums from address `to` on.
DEV void add_words(float* to, u32 w0, u32 w1) {
#if ACT_F32
    to[0] += as_f32(w0);
    to[1] += as_f32(w1);
#else
    to[0] += low_half(w0);
    to[1] += high_half(w0);
    to[2] += low_half(w1);
    to[3] += high_half(w1);
#endif
}

// Returns the pair of words from rank r, which is not this rank. `found`: pairs from all other ranks, in
// order of ranks. The function selects between values instead of indexing the array, so that the array stays
// in registers.
DEV u64x2 pair_of(const u64x2 (&found)[OTHERS], u32 r, const AllReduceLaunch& l) {
    const u64x2 below = found[r < OTHERS ? r : OTHERS - 1], above = found[r > 0 ? r - 1 : 0];
    u64x2 pair;
    for (u32 i = 0; i < 2; ++i) pair.v[i] = r < l.rank ? below.v[i] : above.v[i];
    return pair;
}

// Sums groups of eight elements over the ranks into `sums`. `index`: indices of the groups; a group with
// index NO_GROUP is skipped. `own`: the elements of this rank. Polls as many words of other ranks at a time
// as fit into registers, because one poll takes longer than all the arithmetic.
template <u32 N> DEV void sum_of_ranks(AllReduceLaunch& l, const u32 (&index)[N], const ElementGroup (&own)[N],
                                       f32x8 (&sums)[N]) {
    constexpr u32 POLLED_PAIRS = MAX_POLLED_PAIRS < N * PAIRS ? MAX_POLLED_PAIRS : N * PAIRS;
    UNROLL for (u32 first = 0; first < N * PAIRS; first += POLLED_PAIRS) {
        u64x2 found[POLLED_PAIRS][OTHERS];
        bool complete;
        do {
            complete = true;
            UNROLL for (u32 q = 0; q < POLLED_PAIRS; ++q) {
                const u32 n = (first + q) / PAIRS, p = (first + q) % PAIRS;
                if (index[n] == NO_GROUP) continue;
                UNROLL for (u32 o = 0; o < OTHERS; ++o) {
                    found[q][o] = load_peer(slot_address(l, l.memory.own, o < l.rank ? o : o + 1, p, index[n]));
                    UNROLL for (u32 w = 0; w < 2; ++w) complete &= (u32)(found[q][o].v[w] >> 32) == l.number;
                }
            }
        } while (!complete && !is_aborted(l));
        UNROLL for (u32 q = 0; q < POLLED_PAIRS; ++q) {
            const u32 n = (first + q) / PAIRS, p = (first + q) % PAIRS;
            if (index[n] == NO_GROUP) continue;
            float part[8 / PAIRS] = {};
            UNROLL for (u32 r = 0; r < RANKS; ++r) {
                const u64x2 other = pair_of(found[q], r, l);
                const u32 w0 = r == l.rank ? own[n].words[2 * p] : (u32)other.v[0];
                const u32 w1 = r == l.rank ? own[n].words[2 * p + 1] : (u32)other.v[1];
                add_words(part, w0, w1);
            }
            UNROLL for (u32 i = 0; i < 8 / PAIRS; ++i) sums[n].v[p * (8 / PAIRS) + i] = part[i];
        }
    }
}

// Loads eight elements, unconverted, from an address that is aligned to 16 bytes.
DEV ElementGroup load_group(const ACT* p) {
    ElementGroup r;
    for (u32 i = 0; i < PAIRS / 2; ++i) {
        const u32x4 four = ((const u32x4*)p)[i];
        for (u32 w = 0; w < 4; ++w) r.words[4 * i + w] = four.v[w];
    }
    return r;
}

// Loads `count` elements, at most eight, from an address of any alignment; the remaining elements of the
// group are zero.
DEV ElementGroup load_partial_group(const ACT* p, u32 count) {
    ACT values[8];
    for (u32 i = 0; i < 8; ++i) values[i] = i < count ? p[i] : to<ACT>(0.f);
    ElementGroup r;
    for (u32 w = 0; w < 2 * PAIRS; ++w) {
#if ACT_F32
        r.words[w] = as_u32(values[w]);
#else
        r.words[w] = (u32)values[2 * w].bits | (u32)values[2 * w + 1].bits << 16;
#endif
    }
    return r;
}
