// gemm_large_m: y [M, N] = x [M, K] W [N, K]^T for thousands of rows, in half_t on NVIDIA sm_90a (persistent,
// warp-specialised, TMA multicast and WGMMA). CPU reference: `Linear`, followed by `GatedActivation` with GATED.
//
//   -DGATED=1  y [M, N / 2] = gated(gate, up), where the first half of W's rows gives gate and the second
//              half up. A tile has gate and up columns of the same outputs, so that these are never stored
// K is a multiple of 64, the number of outputs a multiple of 8; rows of x and y are aligned to 16 bytes.
// Boxes of the TMA descriptors: 16 rows for y, 128 rows for x and W. Grid: at most one block per SM, a
// multiple of 2. Block: 12 warps. Dynamic shared memory: 231,424 bytes (gemm_large_m/ring.h).
//
// A cluster of two blocks processes tiles of 256 rows of x by 256 rows of W (called lines): each block has
// half of the rows of x, and every line of W is multicast to both. In a block, one producer warp loads steps
// of 64 k, and two consumer warpgroups multiply 64 rows each. Sums are over ascending k, so the result of a
// row is bit-identical in any batch. Rounding: the sum once to half_t; GATED as in gemm_small_m. Roofline: 2
// M N K operations; the GPU's power limit also bounds it.
#include "dev.h"
#include "dev/strip.h"
#ifndef GATED
#  define GATED 0
#endif
#include "gemm_large_m/roles.h"

KERNEL_CLUSTER(THREADS, CLUSTER)
gemm_large_m(half_t* y, const half_t* x, const half_t* w, TENSOR_MAP y_map, TENSOR_MAP x_map, TENSOR_MAP w_map, u32 m, u32 n,
             u32 k, u32 y_stride, u32 x_stride) {
    const StageRing ring = make_ring();
    cluster_wait<CLUSTER>();
    grid_wait();
    grid_launch_dependents();
    const u32 outputs = GATED ? n / 2 : n;
    const TmaGemmProblem product{{y, m, y_stride}, {x, m, x_stride}, {w, n, k}, outputs, k};
    const GemmTensorMaps maps{&y_map, &x_map, &w_map};
    if (warp_id() < PRODUCER_WARPS) {
        reg_dealloc<40>();
        if (tid() == 0) fetch(ring, product, maps);
    } else {
        reg_alloc<232>();
        consume_tiles(ring, product, maps);
    }
}
EXPORT(gemm_large_m)
