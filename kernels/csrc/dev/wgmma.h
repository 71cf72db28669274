// dev/wgmma.h - WGMMA: a warpgroup (four consecutive warps, the first a multiple of four) multiplies 64 rows
// by a matrix in shared memory, asynchronously. NVIDIA sm_90a, and the emulator with warps of 32 lanes, where
// an MMA completes at once.
//
// Operands are in shared memory as panels with the 128-byte swizzle: consecutive rows of 128 bytes (64
// half_t), the first at a multiple of 1024 bytes; the eight 16-byte pieces of a row are permuted by
// panel_offset(). Wider matrices are several panels.
//
//   align_1024(p)           first address from p on that is aligned for a panel
//   panel_offset(row, piece)  offset of a piece from the panel's start, in bytes
//   by_k(panel)             KMajorOperand: a panel row has 64 consecutive k of one row of A or one column of B
//   by_n(panel, next)       NMajorOperand: a row has 64 consecutive columns of B of one k; the panel of the next 64
//                           columns is `next` bytes further on
//   advanced(x, bytes)      operand advanced by `bytes`: 32 bytes are 16 k in a row, 128 bytes are a row
//   warp_uniform(x)         an operand that is uniform over the warp, in uniform registers: advancing it
//                           takes one instruction instead of a dozen. Every lane must call it
//   opaque(x)               x, opaque to the compiler: values derived from it are recomputed instead of kept
//                           in registers
//
//   wgmma<N>(c, a, b, add)  c [64][N] = a [64][16] b [16][N] (+ c if add); N: see WGMMA_WIDTH; c:
//                          float[N / 2].
//                           a: KMajorOperand or u32[4]; b: KMajorOperand or NMajorOperand
//     element i of c is row wgmma_row(i), column wgmma_col(i). An accumulator becomes the register operand a
//     of the next MMA, its columns as k: a[i] = pack_half(c[2 i], c[2 i + 1]), i < 4, are the first 16 k, and
//     so on
//   wgmma_fence()           before the first WGMMA, and after other instructions wrote its registers
//   wgmma_commit() wgmma_wait<N>()  closes a group of WGMMAs; waits until at most N groups are in flight
//   wgmma_fence_operand(c)  called after the wait: the compiler cannot move reads of c before it. The
//                           registers of a WGMMA in flight must not be reused
//
//   fence_async_shared()    makes shared memory writes visible to this thread visible to its WGMMAs (async
//                           proxy)
//   reg_alloc<N>() reg_dealloc<N>()  setmaxnreg: registers per thread of a warpgroup; the kernel must be a
//                           KERNEL_ALONE
//   KERNEL_ALONE(threads)   KERNEL with one resident block per SM
#pragma once

DEV u32 panel_offset(u32 row, u32 piece) { return row * 128 + (piece ^ (row & 7)) * 16; }
DEV u32 wgmma_row(u32 i) { return (warp_id() & 3) * 16 + (lane() >> 2) + (i >> 1 & 1) * 8; }
DEV u32 wgmma_col(u32 i) { return (i >> 2) * 8 + (lane() & 3) * 2 + (i & 1); }

#if DEV_EMU
#  define KERNEL_ALONE(max_threads) KERNEL(max_threads)
// WGMMA operand in shared memory, k-major (emulated): address of the panel.
struct KMajorOperand { const u8* at; };
// WGMMA operand in shared memory, n-major (emulated): address of the first panel, and distance in bytes to
// the next panel.
struct NMajorOperand { const u8* at; u32 next; };
DEV KMajorOperand by_k(const void* panel) { return KMajorOperand{(const u8*)panel}; }
DEV NMajorOperand by_n(const void* panel, u32 next) { return NMajorOperand{(const u8*)panel, next}; }
DEV KMajorOperand advanced(KMajorOperand x, u32 bytes) { return KMajorOperand{x.at + bytes}; }
DEV NMajorOperand advanced(NMajorOperand x, u32 bytes) { return NMajorOperand{x.at + bytes, x.next}; }
template <class Operand> DEV Operand warp_uniform(Operand x) { return x; }
DEV u32 opaque(u32 x) { return x; }
DEV u8* align_1024(u8* p) { return p + (0 - (u64)p) % 1024; }

// Returns the element at byte `offset` of a swizzled panel. As in hardware, bits 4 to 6 of the address are
// xored with its bits 7 to 9.
DEV float panel_value(const u8* at, u32 offset) {
    const u64 address = (u64)at + offset;
    return f32(*(const half_t*)(address ^ (address >> 7 & 7) << 4));
}
DEV float panel_element(KMajorOperand x, u32 k, u32 n) { return panel_value(x.at, n * 128 + k * 2); }
DEV float panel_element(NMajorOperand x, u32 k, u32 n) { return panel_value(x.at, n / 64 * x.next + k * 128 + n % 64 * 2); }

// Computes the elements of c that this lane has, each as a sum over ascending k. a(row, k) returns an element
// of A, where `row` is one of the 16 rows of this warp.
template <u32 N, class A, class B> DEV void own_products(float (&c)[N / 2], const A& a, const B& b, bool add) {
    for (u32 i = 0; i < N / 2; i += 4)
        for (u32 column = 0; column < 2; ++column) {
            float sums[2] = {add ? c[i + column] : 0.f, add ? c[i + column + 2] : 0.f};
            for (u32 k = 0; k < 16; ++k) {
                const float value = panel_element(b, k, wgmma_col(i + column));
                for (u32 half = 0; half < 2; ++half) sums[half] += a((lane() >> 2) + half * 8, k) * value;
            }
            c[i + column] = sums[0];
            c[i + column + 2] = sums[1];
        }
}
template <u32 N, class B> DEV void wgmma(float (&c)[N / 2], KMajorOperand a, B b, bool add DEV_SITE) {
    emu::wave_collective(site, nullptr);
    const KMajorOperand mine = advanced(a, (warp_id() & 3) * 16 * 128);
    own_products<N>(c, [&](u32 row, u32 k) { return panel_element(mine, k, row); }, b, add);
}
template <u32 N, class B> DEV void wgmma(float (&c)[N / 2], const u32 (&a)[4], B b, bool add DEV_SITE) {
    emu::WaveExchange& mine = emu::exchange();
    for (u32 i = 0; i < 8; ++i) {
        const u32 row = (lane() >> 2) + (i >> 1 & 1) * 8, k = (lane() & 3) * 2 + (i & 1) + (i >> 2) * 8;
        mine.a[row * 16 + k] = i & 1 ? high_half(a[i / 2]) : low_half(a[i / 2]);
    }
    const emu::WaveExchange& all = emu::wave_collective(site, nullptr);
    own_products<N>(c, [&](u32 row, u32 k) { return all.a[row * 16 + k]; }, b, add);
}
DEV void wgmma_fence() {}
DEV void wgmma_commit() {}
// Emulated WGMMAs complete at once; wgmma_wait() only waits until every lane of the warp has executed its
// part of them.
template <u32 N> DEV void wgmma_wait(u32 site = __builtin_LINE()) { emu::wave_collective(site, nullptr); }
template <u32 N> DEV void wgmma_fence_operand(float (&)[N]) {}
DEV void fence_async_shared() {}
template <u32 N> DEV void reg_alloc() {}
template <u32 N> DEV void reg_dealloc() {}
#elif DEV_NV
#  define KERNEL_ALONE(max_threads) extern "C" __global__ __launch_bounds__(max_threads, 1) void
// Matrix descriptor: address / 16, leading byte offset / 16 from bit 16, stride byte offset (eight rows) / 16
// from bit 32, 1 in bit 62: 128-byte swizzle.
struct KMajorOperand { u64 bits; };
struct NMajorOperand { u64 bits; };
DEV u64 panel_bits(const void* panel, u32 next) {
    return (u64)(shared_address(panel) >> 4) | (u64)(next >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
DEV KMajorOperand by_k(const void* panel) { return KMajorOperand{panel_bits(panel, 16)}; }
DEV NMajorOperand by_n(const void* panel, u32 next) { return NMajorOperand{panel_bits(panel, next)}; }
DEV KMajorOperand advanced(KMajorOperand x, u32 bytes) { return KMajorOperand{x.bits + (bytes >> 4)}; }
DEV NMajorOperand advanced(NMajorOperand x, u32 bytes) { return NMajorOperand{x.bits + (bytes >> 4)}; }
template <class Operand> DEV Operand warp_uniform(Operand x) {
    return Operand{x.bits >> 32 << 32 | __shfl_sync(0xffffffffu, (u32)x.bits, 0)};
}
DEV u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
DEV u8* align_1024(u8* p) { return p + (0u - shared_address(p)) % 1024; }

template <class B> struct WgmmaTranspose;  // transpose flag of operand B in the instruction
template <> struct WgmmaTranspose<KMajorOperand> { enum : int { FLAG = 0 }; };
template <> struct WgmmaTranspose<NMajorOperand> { enum : int { FLAG = 1 }; };

// Macros for the inline PTX of a WGMMA with n accumulator registers: WGMMA_NAMES_n lists their operand names,
// WGMMA_n(i) their asm constraints.
#  define WGMMA_NAMES_4 "%0,%1,%2,%3"
#  define WGMMA_NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#  define WGMMA_NAMES_16 WGMMA_NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#  define WGMMA_NAMES_24 WGMMA_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#  define WGMMA_NAMES_32 WGMMA_NAMES_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#  define WGMMA_NAMES_40 WGMMA_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#  define WGMMA_NAMES_48 WGMMA_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#  define WGMMA_NAMES_56 WGMMA_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#  define WGMMA_NAMES_64 WGMMA_NAMES_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#  define WGMMA_NAMES_72 WGMMA_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#  define WGMMA_NAMES_80 WGMMA_NAMES_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#  define WGMMA_NAMES_88 WGMMA_NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#  define WGMMA_NAMES_96 WGMMA_NAMES_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#  define WGMMA_NAMES_104 WGMMA_NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#  define WGMMA_NAMES_112 WGMMA_NAMES_104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#  define WGMMA_NAMES_120 WGMMA_NAMES_112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#  define WGMMA_NAMES_128 WGMMA_NAMES_120 ",%120,%121,%122,%123,%124,%125,%126,%127"
#  define WGMMA_FOUR(i) "+f"(c[i]), "+f"(c[(i) + 1]), "+f"(c[(i) + 2]), "+f"(c[(i) + 3])
#  define WGMMA_8(i) WGMMA_FOUR(i), WGMMA_FOUR((i) + 4)
#  define WGMMA_16(i) WGMMA_8(i), WGMMA_8((i) + 8)
#  define WGMMA_24(i) WGMMA_16(i), WGMMA_8((i) + 16)
#  define WGMMA_32(i) WGMMA_16(i), WGMMA_16((i) + 16)
#  define WGMMA_40(i) WGMMA_32(i), WGMMA_8((i) + 32)
#  define WGMMA_48(i) WGMMA_32(i), WGMMA_16((i) + 32)
#  define WGMMA_64(i) WGMMA_32(i), WGMMA_32((i) + 32)
#  define WGMMA_96(i) WGMMA_64(i), WGMMA_32((i) + 64)
#  define WGMMA_128(i) WGMMA_96(i), WGMMA_32((i) + 96)

// Defines the WGMMA instruction for N columns. NAMES: operand names of the N / 2 accumulators. PLACES: their
// asm constraints. I0 to I6: names of the other operands (A, B and flags).
template <u32 N> struct Wgmma;
#  define WGMMA_WIDTH(N, NAMES, PLACES, I0, I1, I2, I3, I4, I5, I6)                                                   \
    template <> struct Wgmma<N> {                                                                                     \
        template <int TRANSPOSE_B> DEV void run(float (&c)[N / 2], KMajorOperand a, u64 b, u32 add) {                               \
            asm volatile("{\n\t.reg .pred grows;\n\tsetp.ne.b32 grows, " I2 ", 0;\n\t"                                    \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." HALF_PTX "." HALF_PTX " {" NAMES "}, " I0  \
                         ", " I1 ", grows, 1, 1, 0, " I3 ";\n\t}"                                                       \
                         : PLACES(0) : "l"(a.bits), "l"(b), "r"(add), "n"(TRANSPOSE_B));                                     \
        }                                                                                                             \
        template <int TRANSPOSE_B> DEV void run(float (&c)[N / 2], const u32 (&a)[4], u64 b, u32 add) {                      \
            asm volatile("{\n\t.reg .pred grows;\n\tsetp.ne.b32 grows, " I5 ", 0;\n\t"                                    \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." HALF_PTX "." HALF_PTX " {" NAMES "}, {" I0 \
                         "," I1 "," I2 "," I3 "}, " I4 ", grows, 1, 1, " I6 ";\n\t}"                                    \
                         : PLACES(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSE_B));      \
        }                                                                                                             \
    };
WGMMA_WIDTH(8, WGMMA_NAMES_4, WGMMA_FOUR, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
WGMMA_WIDTH(16, WGMMA_NAMES_8, WGMMA_8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
WGMMA_WIDTH(32, WGMMA_NAMES_16, WGMMA_16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
WGMMA_WIDTH(48, WGMMA_NAMES_24, WGMMA_24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
WGMMA_WIDTH(64, WGMMA_NAMES_32, WGMMA_32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WGMMA_WIDTH(80, WGMMA_NAMES_40, WGMMA_40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
WGMMA_WIDTH(96, WGMMA_NAMES_48, WGMMA_48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
WGMMA_WIDTH(128, WGMMA_NAMES_64, WGMMA_64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
WGMMA_WIDTH(192, WGMMA_NAMES_96, WGMMA_96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
WGMMA_WIDTH(256, WGMMA_NAMES_128, WGMMA_128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

template <u32 N, class B> DEV void wgmma(float (&c)[N / 2], KMajorOperand a, B b, bool add) {
    Wgmma<N>::template run<WgmmaTranspose<B>::FLAG>(c, a, b.bits, add);
}
template <u32 N, class B> DEV void wgmma(float (&c)[N / 2], const u32 (&a)[4], B b, bool add) {
    Wgmma<N>::template run<WgmmaTranspose<B>::FLAG>(c, a, b.bits, add);
}
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
template <u32 N> DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory"); }
template <u32 N> DEV void wgmma_fence_operand(float (&c)[N]) {
    _Pragma("unroll") for (u32 i = 0; i < N; ++i) asm volatile("" : "+f"(c[i]) : : "memory");
}
DEV void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
template <u32 N> DEV void reg_alloc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(N)); }
template <u32 N> DEV void reg_dealloc() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(N)); }
#endif
