// dev/cluster.h - thread block clusters: blocks that run concurrently and write to each other's shared memory
// (DSMEM).
// NVIDIA from sm_90 on, and the emulator. A cluster is CLUSTER consecutive blocks along x.
//
//   cluster_rank<CLUSTER>()  rank of this block within its cluster
//   cluster_arrive<CLUSTER>() cluster_wait<CLUSTER>()  every thread arrives once, after its block's barriers
//                           are initialised; after the wait a thread may write to the shared memory of the
//                           other blocks
//   peer_store<CLUSTER>(to, rank, v, b)  stores 16 bytes to block `rank`, at the offset that `to` has in this
//                           block, and counts them in that block's barrier `b`. Both `to` and `b` are in
//                           dynamic shared memory, at offsets from its start that are equal in every block
//   barrier_wait_peers(b, phase)  barrier_wait with cluster scope: stores of other blocks are visible
//                           afterwards
#pragma once
#include "dev/bulk.h"

template <u32 CLUSTER> DEV u32 cluster_rank() { return bid_x() % CLUSTER; }

#if DEV_NV
template <u32 CLUSTER> DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory"); }
template <u32 CLUSTER> DEV void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory"); }
DEV u32 peer_address(const void* p, u32 rank) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared_address(p)), "r"(rank));
    return r;
}
template <u32 CLUSTER> DEV void peer_store(void* to, u32 rank, const f32x4& v, Barrier* b) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 : : "r"(peer_address(to, rank)), "f"(v.v[0]), "f"(v.v[1]), "f"(v.v[2]), "f"(v.v[3]),
                     "r"(peer_address(b, rank)) : "memory");
}
DEV void barrier_wait_peers(Barrier* b, u32 phase) {
    asm volatile(
        "{\n\t.reg .pred over;\n\t"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [%0], %1;\n\t"
        "@over bra done;\n\tbra again;\n\tdone:\n\t}"
        : : "r"(shared_address(b)), "r"(phase) : "memory");
}
#elif DEV_EMU
template <u32 CLUSTER> DEV void cluster_arrive() { emu::cluster_arrive(CLUSTER); }
template <u32 CLUSTER> DEV void cluster_wait() { emu::cluster_wait(CLUSTER); }
template <u32 CLUSTER> DEV void peer_store(void* to, u32 rank, const f32x4& v, Barrier* b) {
    u8* peer = emu::peer_dynamic(CLUSTER, rank);
    memcpy(peer + ((u8*)to - emu::self->dynamic), &v, 16);
    Barrier* counts = (Barrier*)(peer + ((u8*)b - emu::self->dynamic));
    __atomic_sub_fetch(&counts->bytes, 16, __ATOMIC_ACQ_REL);
    barrier_complete_phase(counts);
}
DEV void barrier_wait_peers(Barrier* b, u32 phase) { barrier_wait(b, phase); }
#endif
