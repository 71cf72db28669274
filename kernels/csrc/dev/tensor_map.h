// dev/tensor_map.h - TMA loads of boxes of a half_t matrix into swizzled panels for WGMMA (dev/wgmma.h).
// NVIDIA from sm_90 on, and the emulator, where a copy completes at once.
//
//   TENSOR_MAP              type of a kernel argument: the TMA descriptor with the matrix, its row length and
//                           the box; built by the host (kernels/device/src/gpu/tensor_map.rs). Used on NVIDIA
//                           only; on other targets the kernel's other arguments describe the matrix
//   box_copy(to, map, matrix, width, row, column, b)  TMA load of rows [row, row + 16), columns [column,
//                           column + 64) of a matrix [.., width]: 2048 bytes, part of a panel; `to` is a
//                           multiple of 8 rows from the panel's start. Counts its bytes in b
//   panel_copy(to, map, matrix, rows, row, column, b)  box_copy of `rows` rows, the map's box height; rows
//                           after the matrix's last are zero-filled, which is slow. `matrix` describes the
//                           matrix of the map
//   panel_copy_once         panel_copy for data that no other block reads; its last argument is read_once()
#pragma once
#if !DEV_AMD
#  include "dev/bulk.h"
#endif

enum : u32 { BOX_ROWS = 16, BOX_BYTES = BOX_ROWS * 128 };
// Row-major half_t matrix in global memory: address, number of rows, and row stride in elements.
struct HalfMatrixView { const half_t* at; u32 rows, stride; };

#if DEV_NV
struct alignas(64) TensorMap { u64 bits[16]; };
#  define TENSOR_MAP const __grid_constant__ TensorMap
DEV void box_copy(void* to, const TensorMap* map, const half_t*, u32, u32 row, u32 column, Barrier* b) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        : : "r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(b)) : "memory");
}
DEV void panel_copy(void* to, const TensorMap* map, const HalfMatrixView&, u32, u32 row, u32 column, Barrier* b) {
    box_copy(to, map, nullptr, 0, row, column, b);
}
DEV void panel_copy_once(void* to, const TensorMap* map, const HalfMatrixView&, u32, u32 row, u32 column, Barrier* b,
                         u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;"
        : : "r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(b)), "l"(policy) : "memory");
}
#else
struct TensorMap { u64 bits[16]; };
#  define TENSOR_MAP TensorMap
#  if DEV_EMU
DEV void box_copy(void* to, const TensorMap*, const half_t* matrix, u32 width, u32 row, u32 column, Barrier* b) {
    for (u32 i = 0; i < BOX_ROWS; ++i)
        for (u32 piece = 0; piece < 8; ++piece)
            memcpy((u8*)to + i * 128 + (piece ^ (i & 7)) * 16, matrix + (u64)(row + i) * width + column + piece * 8, 16);
    __atomic_sub_fetch(&b->bytes, (i32)BOX_BYTES, __ATOMIC_ACQ_REL);
    barrier_complete_phase(b);
}
DEV void panel_copy(void* to, const TensorMap*, const HalfMatrixView& m, u32 rows, u32 row, u32 column, Barrier* b) {
    for (u32 i = 0; i < rows; ++i)
        for (u32 piece = 0; piece < 8; ++piece) {
            u8* place = (u8*)to + i * 128 + (piece ^ (i & 7)) * 16;
            if (row + i < m.rows) memcpy(place, m.at + (u64)(row + i) * m.stride + column + piece * 8, 16);
            else memset(place, 0, 16);
        }
    __atomic_sub_fetch(&b->bytes, (i32)rows * 128, __ATOMIC_ACQ_REL);
    barrier_complete_phase(b);
}
DEV void panel_copy_once(void* to, const TensorMap* map, const HalfMatrixView& m, u32 rows, u32 row, u32 column,
                         Barrier* b, u64) {
    panel_copy(to, map, m, rows, row, column, b);
}
#  endif
#endif
