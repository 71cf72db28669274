// one_shot_all_reduce/peer_exchange.h - what ranks show each other in one shot, and the sums of it.
//
// -DRANKS=2..8 of them, each a GPU that writes to the memory of all others. A rank writes what it brings to every other
// one, and adds up what the others have written to its own memory: one way over the link, and no answer. Sums are in
// f32, from 0 on, in the order of ranks, so that all ranks hold the same bits.
//
// Memory of a rank: two halves, in each an area for every rank. The launches of a group are numbered from 1 on; launch
// n uses half n % 2. Four bytes of what is shown and the number of the launch are one word of eight bytes, which is
// there as a whole or not at all: no flag follows the data, nothing is fenced, and whoever finds the number has the
// data. A flag behind the data would cost a fence, which waits for an answer from the other end of the link.
//
// Why two halves are enough: rank A writes to a half of B's memory in launch n + 2 after its launch n + 1 has ended, in
// which it found what B wrote in B's launch n + 1, which began when B's launch n had ended, and with it B's reading of
// that half. Kernels begin to write behind grid_wait(), so none does while the one before it reads.
//
// The number lives in the memory of the device and each launch leaves it advanced, so a recording can be replayed as
// often as wanted. It leaves out 0, which fresh memory holds, and comes to 2 after 2^32 - 1: the halves go on in turn.
// A server comes there within days, so a word that is left from the same number of the last round must not be taken for
// new: the last launch of a round with each half clears it as it ends. Everybody's writing to that half is over then,
// found by one of its blocks, and so is its reading; who writes to it next has found for it what this rank shows in the
// launch behind this one.
//
// Blocks wait for what blocks of other ranks show, so all blocks of a launch must run at once: a grid has at most as
// many as the device has multiprocessors, and each shows all it has before it waits. Who waits looks at a word of host
// memory now and then: once it is not 0 nobody waits any more, and what comes out means nothing.
#pragma once
#include "dev/peer.h"

enum : u32 {
    OTHERS = RANKS - 1,
    PAIRS = sizeof(ACT),  // of words, for eight elements
    AT_ONCE = OTHERS == 1 ? 8 : OTHERS == 2 ? 4 : OTHERS <= 4 ? 4 / PAIRS : 1,  // pairs of a rank, looked for together
    LOOKS = 1024,  // at memory, for each at the host's word
    NOTHING = ~0u
};

struct Memory { u8 *own, *of[OTHERS]; };  // this rank's, and of the others in their order, as this GPU reaches it
struct Count { u32 launch, left; };  // launches so far; blocks of the one under way that are done

// A launch as one thread sees it.
struct Launch {
    Memory memory;
    Count* count;
    const u32* over;
    u64 area_bytes;
    u32 rank, eights, number, looks;  // `eights`: eight elements each, of the whole matrix
    bool alone;                       // nobody else is waited for any more
};

struct Eight { u32 words[2 * PAIRS]; };

// Behind grid_wait().
DEV Launch begin_launch(const Memory& memory, Count* count, const u32* over, u64 area_bytes, u32 rank, u32 eights) {
    const u32 last = count->launch;
    return Launch{memory, count, over, area_bytes, rank, eights, last == ~0u ? 2 : last + 1, 0, false};
}

// Makes the half of this rank's memory that the launch has used what it was at first: the work of one thread, for some
// milliseconds every few days.
DEV void clear_half(const Launch& l) {
    const u64 half_bytes = RANKS * l.area_bytes;
    u64x2* half = (u64x2*)(l.memory.own + (l.number & 1) * half_bytes);
    for (u64 i = 0; i < half_bytes / sizeof(u64x2); ++i) store_peer(half + i, {{0, 0}});
    fence_peers();
}

// Every thread must come, done with its reading.
DEV void end_launch(const Launch& l) {
    sync();
    if (tid() != 0 || atomic_add_acq_rel(&l.count->left, 1) + 1 != gdim_x()) return;
    if (l.number >= ~0u - 1) clear_half(l);
    l.count->left = 0;
    l.count->launch = l.number;
}

// Where pair `pair` of the eight number i that rank `from` shows lies in some rank's memory.
DEV u64x2* place(const Launch& l, u8* memory, u32 from, u32 pair, u32 i) {
    u8* area = memory + ((l.number & 1) * RANKS + from) * l.area_bytes;
    return (u64x2*)area + (u64)pair * l.eights + i;
}

DEV u64 word(u32 data, u32 number) { return (u64)number << 32 | data; }

DEV void publish_to_peers(const Launch& l, u32 i, const Eight& x) {
    UNROLL for (u32 to = 0; to < OTHERS; ++to)
        UNROLL for (u32 p = 0; p < PAIRS; ++p)
            store_peer(place(l, l.memory.of[to], l.rank, p, i),
                       {{word(x.words[2 * p], l.number), word(x.words[2 * p + 1], l.number)}});
}

DEV bool is_aborted(Launch& l) {
    peer_pause();
    if (++l.looks % LOOKS == 0) l.alone = l.alone || load_host(l.over) != 0;
    return l.alone;
}

// Adds the elements in two words to the sums from `to` on.
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

// What rank r shows, out of what the others do; `found` leaves this rank out. Values are chosen, not addresses, so that
// they stay in registers.
DEV u64x2 pair_of(const u64x2 (&found)[OTHERS], u32 r, const Launch& l) {
    const u64x2 before = found[r < OTHERS ? r : OTHERS - 1], behind = found[r > 0 ? r - 1 : 0];
    u64x2 pair;
    for (u32 i = 0; i < 2; ++i) pair.v[i] = r < l.rank ? before.v[i] : behind.v[i];
    return pair;
}

// The sums over the ranks of the eights numbered `index`, of which this rank has shown `own`; NOTHING stays as it is.
// As many as registers hold are looked for at a time: to look once takes longer than all the arithmetic.
template <u32 N> DEV void sum_of_ranks(Launch& l, const u32 (&index)[N], const Eight (&own)[N], f32x8 (&sums)[N]) {
    constexpr u32 TOGETHER = AT_ONCE < N * PAIRS ? AT_ONCE : N * PAIRS;
    UNROLL for (u32 first = 0; first < N * PAIRS; first += TOGETHER) {
        u64x2 found[TOGETHER][OTHERS];
        bool whole;
        do {
            whole = true;
            UNROLL for (u32 q = 0; q < TOGETHER; ++q) {
                const u32 n = (first + q) / PAIRS, p = (first + q) % PAIRS;
                if (index[n] == NOTHING) continue;
                UNROLL for (u32 o = 0; o < OTHERS; ++o) {
                    found[q][o] = load_peer(place(l, l.memory.own, o < l.rank ? o : o + 1, p, index[n]));
                    UNROLL for (u32 w = 0; w < 2; ++w) whole &= (u32)(found[q][o].v[w] >> 32) == l.number;
                }
            }
        } while (!whole && !is_aborted(l));
        UNROLL for (u32 q = 0; q < TOGETHER; ++q) {
            const u32 n = (first + q) / PAIRS, p = (first + q) % PAIRS;
            if (index[n] == NOTHING) continue;
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

// Eight elements as they lie in memory, aligned to 16 bytes.
DEV Eight load_eight(const ACT* p) {
    Eight r;
    for (u32 i = 0; i < PAIRS / 2; ++i) {
        const u32x4 four = ((const u32x4*)p)[i];
        for (u32 w = 0; w < 4; ++w) r.words[4 * i + w] = four.v[w];
    }
    return r;
}

// The same of memory that is aligned to nothing, or of fewer than eight: zeros behind them.
DEV Eight load_some(const ACT* p, u32 count) {
    ACT values[8];
    for (u32 i = 0; i < 8; ++i) values[i] = i < count ? p[i] : to<ACT>(0.f);
    Eight r;
    for (u32 w = 0; w < 2 * PAIRS; ++w) {
#if ACT_F32
        r.words[w] = as_u32(values[w]);
#else
        r.words[w] = (u32)values[2 * w].bits | (u32)values[2 * w + 1].bits << 16;
#endif
    }
    return r;
}
