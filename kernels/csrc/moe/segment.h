// moe/segment.h - order of routed tokens between the kernels of an expert MLP: sorted by expert, and cut into
// segments.
//
// A choice is a (token, expert) pair: choice c = t * top_k + j is token t with its j-th selected expert.
// moe_align sorts the choices by expert into `order`, and cuts the choices of each expert into segments, each
// of at most as many choices (rows of x) as one block of the expert kernel processes. Row p of the
// activations between the two GEMMs belongs to the choice at position p of `order`; the results of the second
// GEMM are indexed by choice, as moe_combine needs them.
#pragma once

// Segment: successive choices ((token, expert) pairs) of one expert, which one block processes.
struct alignas(16) ExpertSegment {
    u32 expert;  // expert index on this rank
    u32 first;   // first position in `order`
    u32 rows;    // 0: nothing to do
    u32 all;     // number of segments; set in the first segment only
};

// Functions that load from L2 (ld.cg) and bypass the L1 cache. They may be called before grid_wait() if the
// previous kernel does not write the data.
#if DEV_NV
DEV ExpertSegment load_segment(const ExpertSegment* p) {
    ExpertSegment s;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(s.expert), "=r"(s.first), "=r"(s.rows), "=r"(s.all) : "l"(p) : "memory");
    return s;
}
DEV u32 load_l2(const void* p) {
    u32 v; asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
#else
DEV ExpertSegment load_segment(const ExpertSegment* p) { return *p; }
DEV u32 load_l2(const void* p) { return *(const u32*)p; }
#endif
