// Test kernels of gfx950's scaled MFMA: each lane has 32 elements in eight words, and the bytes of one word as scales.
#include "dev.h"

typedef int Words8 __attribute__((ext_vector_type(8)));
typedef float Sums4 __attribute__((ext_vector_type(4)));

// c [16][16] += a * b. FORMAT: 0 fp8, 4 fp4. BYTE: which byte of its word is the scale of A.
template <u32 FORMAT, u32 BYTE>
DEV void scaled_product(float* c, const u32* a, const u32* b, const u32* scales) {
    Words8 fa, fb;
    Sums4 sums;
    for (u32 i = 0; i < 8; ++i) {
        fa[i] = (int)a[lane() * 8 + i];
        fb[i] = (int)b[lane() * 8 + i];
    }
    for (u32 i = 0; i < 4; ++i) sums[i] = c[(lane() / 16 * 4 + i) * 16 + lane() % 16];
    sums = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(fa, fb, sums, FORMAT, FORMAT, BYTE, (int)scales[lane()], 0,
                                                            (int)scales[64 + lane()]);
    for (u32 i = 0; i < 4; ++i) c[(lane() / 16 * 4 + i) * 16 + lane() % 16] = sums[i];
}

KERNEL(64) scaled_fp8(float* c, const u32* a, const u32* b, const u32* scales) { scaled_product<0, 2>(c, a, b, scales); }
EXPORT(scaled_fp8)
KERNEL(64) scaled_fp4(float* c, const u32* a, const u32* b, const u32* scales) { scaled_product<4, 2>(c, a, b, scales); }
EXPORT(scaled_fp4)
