// Test kernels: C = A * B by one warp for every MMA of dev.h, through its layout functions; every lane has
// exactly the elements that its layout assigns to it. A [M, K], B [K, N] and C [M, N] are row-major.
#include "dev.h"

template <class Layout, u32 N, u32 K, class FA, class FB, class FC, class T, class Multiply>
DEV void product(float* c, const T* a, const T* b, FA* fa, FB* fb, FC* fc, Multiply multiply) {
    for (u32 i = 0; i < Layout::NA; ++i) fa[i] = a[Layout::a_row(i) * K + Layout::a_k(i)];
    for (u32 i = 0; i < Layout::NB; ++i) fb[i] = b[Layout::b_k(i) * N + Layout::b_col(i)];
    for (u32 i = 0; i < Layout::NC; ++i) fc[i] = c[Layout::c_row(i) * N + Layout::c_col(i)];
    multiply();
    for (u32 i = 0; i < Layout::NC; ++i) c[Layout::c_row(i) * N + Layout::c_col(i)] = fc[i];
}

KERNEL(64) tile_16x16x16(float* c, const half_t* a, const half_t* b) {
    FragA fa;
    FragB fb;
    FragC fc;
    product<FragLayout, 16, 16>(c, a, b, fa.x, fb.x, fc.x, [&] { mma16(fc, fa, fb); });
}
EXPORT(tile_16x16x16)

// MMA with fragments loaded from shared memory: A from rows along k; B from columns along k (load_b) or from
// rows (load_b_trans).
KERNEL(64) tile_loads(float* c, const half_t* a, const half_t* b) {
    SHARED(half_x8, row_pieces, 16 * 3);
    SHARED(half_x8, column_pieces, 16 * 3);
    SHARED(half_x8, plain_pieces, 16 * 3);
    half_t *const rows = (half_t*)row_pieces, *const columns = (half_t*)column_pieces, *const plain = (half_t*)plain_pieces;
    for (u32 i = lane(); i < 256; i += WARP_SIZE) {
        rows[i / 16 * 24 + i % 16] = a[i];
        columns[i % 16 * 24 + i / 16] = b[i];
        plain[i / 16 * 24 + i % 16] = b[i];
    }
    warp_sync();
    FragC once = zero_c(), again = zero_c();
    mma16(once, load_a(rows, 24), load_b(columns, 24));
    mma16(again, load_a(rows, 24), load_b_trans(plain, 24));
    for (u32 i = 0; i < FragLayout::NC; ++i) {
        float* place = c + FragLayout::c_row(i) * 16 + FragLayout::c_col(i);
        *place += 0.5f * once.x[i] + 0.5f * again.x[i];
    }
}
EXPORT(tile_loads)

#if DEV_GFX
KERNEL(64) half_32x32x8(float* c, const half_t* a, const half_t* b) {
    half_x4 fa, fb;
    f32x16 fc;
    product<Mfma32x32x8, 32, 8>(c, a, b, fa.v, fb.v, fc.v, [&] { mfma_32x32x8(fc, fa, fb); });
}
EXPORT(half_32x32x8)
#endif

#if DEV_GFX >= 0x942
KERNEL(64) fp8_16x16x32(float* c, const fp8* a, const fp8* b) {
    fp8x8 fa, fb;
    f32x4 fc;
    product<Mfma16x16x32, 16, 32>(c, a, b, fa.v, fb.v, fc.v, [&] { mfma_16x16x32(fc, fa, fb); });
}
EXPORT(fp8_16x16x32)

KERNEL(64) fp8_32x32x16(float* c, const fp8* a, const fp8* b) {
    fp8x8 fa, fb;
    f32x16 fc;
    product<Mfma32x32x16, 32, 16>(c, a, b, fa.v, fb.v, fc.v, [&] { mfma_32x32x16(fc, fa, fb); });
}
EXPORT(fp8_32x32x16)
#endif

#if DEV_GFX >= 0x950
KERNEL(64) half_16x16x32(float* c, const half_t* a, const half_t* b) {
    half_x8 fa, fb;
    f32x4 fc;
    product<Mfma16x16x32, 16, 32>(c, a, b, fa.v, fb.v, fc.v, [&] { mfma_16x16x32(fc, fa, fb); });
}
EXPORT(half_16x16x32)

KERNEL(64) half_32x32x16(float* c, const half_t* a, const half_t* b) {
    half_x8 fa, fb;
    f32x16 fc;
    product<Mfma32x32x16, 32, 16>(c, a, b, fa.v, fb.v, fc.v, [&] { mfma_32x32x16(fc, fa, fb); });
}
EXPORT(half_32x32x16)
#endif

// Converts every fp8 bit pattern to f32, and n f32 numbers to fp8 bits.
KERNEL(256) fp8_numbers(float* wide, u32* narrow, const float* x, u32 n) {
    if (tid() < 256) wide[tid()] = f32(fp8{(u8)tid()});
    for (u32 i = tid(); i < n; i += bdim()) narrow[i] = to_fp8(x[i]).bits;
}
EXPORT(fp8_numbers)
