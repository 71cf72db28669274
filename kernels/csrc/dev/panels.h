// dev/panels.h - TMA multicast loads of panels (dev/wgmma.h) to every block of a cluster, and TMA stores of
// panels. NVIDIA from sm_90 on, and the emulator, where a copy completes at once.
//
//   panel_copy_all<CLUSTER, COUNT>(to, map, matrix, row, column, b)  panel_copy of COUNT rows, multicast to
//                           the same offset in every block of the cluster; counts its bytes in each block's
//                           barrier b. `to` and b are in dynamic shared memory
//   barrier_arrive_at<CLUSTER>(b, rank)  arrives at the barrier that block `rank` has at the offset of `b`.
//                           It orders no memory accesses; it only signals that WGMMA has finished reading
//   box_store(map, matrix, columns, row, column, from)  TMA store of BOX_ROWS rows and 64 columns of a panel,
//                           clipped at the matrix's last row and column; the map's box has BOX_ROWS rows.
//                           Issued by one thread, after the threads that wrote the panel have called
//                           fence_async_shared() and then a barrier that includes the issuing thread
//   KERNEL_CLUSTER(threads, cluster)  KERNEL_ALONE in clusters of `cluster` blocks; the grid is a multiple of
//                           `cluster`
//   boxes_commit() boxes_wait<N>()  closes a group of this thread's TMA stores; waits until at most N groups
//                           still read shared memory
#pragma once
#include "dev/cluster.h"
#include "dev/tensor_map.h"
#include "dev/wgmma.h"

#if DEV_NV
#  define KERNEL_CLUSTER(max_threads, cluster) \
    extern "C" __global__ __cluster_dims__(cluster, 1, 1) __launch_bounds__(max_threads, 1) void
template <u32 CLUSTER, u32 COUNT>
DEV void panel_copy_all(void* to, const TensorMap* map, const HalfMatrixView&, u32 row, u32 column, Barrier* b) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;"
        : : "r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(b)), "h"((u16)((1 << CLUSTER) - 1))
        : "memory");
}
// The mbarrier arrive instruction has no .release qualifier: ordering memory accesses across the cluster
// would take as long as the MMAs of one pipeline stage.
template <u32 CLUSTER> DEV void barrier_arrive_at(Barrier* b, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" : : "r"(peer_address(b, rank)) : "memory");
}
DEV void box_store(const TensorMap* map, const HalfMatrixView&, u32, u32 row, u32 column, const void* from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                 : : "l"(map), "r"(column), "r"(row), "r"(shared_address(from)) : "memory");
}
DEV void boxes_commit() { asm volatile("cp.async.bulk.commit_group;" : : : "memory"); }
template <u32 N> DEV void boxes_wait() { asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(N) : "memory"); }
#elif DEV_EMU
#  define KERNEL_CLUSTER(max_threads, cluster) KERNEL(max_threads)
template <class T> DEV T* in_block(T* here, u32 cluster, u32 rank) {
    return (T*)(emu::peer_dynamic(cluster, rank) + ((u8*)here - emu::self->dynamic));
}
template <u32 CLUSTER, u32 COUNT>
DEV void panel_copy_all(void* to, const TensorMap* map, const HalfMatrixView& m, u32 row, u32 column, Barrier* b) {
    for (u32 rank = 0; rank < CLUSTER; ++rank)
        panel_copy(in_block((u8*)to, CLUSTER, rank), map, m, COUNT, row, column, in_block(b, CLUSTER, rank));
}
template <u32 CLUSTER> DEV void barrier_arrive_at(Barrier* b, u32 rank) { barrier_arrive(in_block(b, CLUSTER, rank)); }
DEV void box_store(const TensorMap*, const HalfMatrixView& m, u32 columns, u32 row, u32 column, const void* from) {
    for (u32 i = 0; i < BOX_ROWS * 64; ++i) {
        const u32 r = i / 64, c = i % 64;
        if (row + r >= m.rows || column + c >= columns) continue;
        memcpy((half_t*)m.at + (u64)(row + r) * m.stride + column + c, (const u8*)from + panel_offset(r, c / 8) + c % 8 * 2, 2);
    }
}
DEV void boxes_commit() {}
template <u32 N> DEV void boxes_wait() {}
#endif
