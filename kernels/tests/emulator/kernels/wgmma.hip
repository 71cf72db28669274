// Test kernels: c [64, N] += a [64, 64] b [64, N] by one warpgroup, as the mean of the products with all four
// combinations of operand forms: a in shared memory or registers, b by columns or by rows in shared memory.
#include "dev.h"
#include "dev/wgmma.h"

enum : u32 { K = 64, PANEL = 64 * 128 };

// Writes a value to rows of 64 values with the 128-byte swizzle of WGMMA operands.
DEV void put(u8* panels, u32 row, u32 column, half_t value) {
    *(half_t*)(panels + row * 128 + ((column / 8) ^ (row & 7)) * 16 + column % 8 * 2) = value;
}

// Dynamic shared memory contains a, b by columns, b by rows, and 1024 bytes for alignment.
template <u32 N> DEV void four_ways(float* c, const half_t* a, const half_t* b) {
    DYN_SHARED(u8, dynamic);
    u8 *lines = align_1024(dynamic), *columns = lines + PANEL, *rows = columns + N * 128;
    for (u32 i = tid(); i < 64 * K; i += bdim()) put(lines, i / K, i % K, a[i]);
    for (u32 i = tid(); i < K * N; i += bdim()) {
        const u32 k = i / N, n = i % N;
        put(columns, n, k, b[i]);
        put(rows + n / 64 * PANEL, k, n % 64, b[i]);
    }
    fence_async_shared();
    sync();
    float kept[N / 2], sum[N / 2];
    for (u32 i = 0; i < N / 2; ++i) sum[i] = 0.f;
    for (u32 variant = 0; variant < 4; ++variant) {
        wgmma_fence_operand(kept);
        wgmma_fence();
        for (u32 k = 0; k < K; k += 16) {
            u32 own[4];
            for (u32 i = 0; i < 4; ++i) {
                const half_t* at = a + wgmma_row(2 * i) * K + k + wgmma_col(2 * i);
                own[i] = (u32)at[0].bits | (u32)at[1].bits << 16;
            }
            const KMajorOperand x = advanced(by_k(lines), k * 2), by_columns = advanced(by_k(columns), k * 2);
            const NMajorOperand by_rows = advanced(by_n(rows, PANEL), k * 128);
            if (variant == 0) wgmma<N>(kept, x, by_columns, k != 0);
            if (variant == 1) wgmma<N>(kept, x, by_rows, k != 0);
            if (variant == 2) wgmma<N>(kept, own, by_columns, k != 0);
            if (variant == 3) wgmma<N>(kept, own, by_rows, k != 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence_operand(kept);
        for (u32 i = 0; i < N / 2; ++i) sum[i] += kept[i] / 4.f;
    }
    for (u32 i = 0; i < N / 2; ++i) c[wgmma_row(i) * N + wgmma_col(i)] += sum[i];
}

KERNEL_ALONE(128) wgmma_64(float* c, const half_t* a, const half_t* b) { four_ways<64>(c, a, b); }
EXPORT(wgmma_64)
KERNEL_ALONE(128) wgmma_128(float* c, const half_t* a, const half_t* b) { four_ways<128>(c, a, b); }
EXPORT(wgmma_128)
KERNEL_ALONE(128) wgmma_256(float* c, const half_t* a, const half_t* b) { four_ways<256>(c, a, b); }
EXPORT(wgmma_256)
