// dev/mfma.h - AMD MFMA builtins beyond the common 16x16x16 tile, for branches under `#if DEV_GFX`. On the
// emulator (-DDEV_EMU_GFX) they use the fragment layouts defined here, which are those of the CDNA ISA
// guides.
//
// In all layouts, for tiles of SIDE (16 or 32) rows: lane i has row i % SIDE of A and column i % SIDE of B;
// successive groups of SIDE lanes have successive k. C of a 16-wide tile: column lane % 16, rows (lane / 16)
// * 4 + i. C of a 32-wide tile: column lane % 32, rows (i / 4) * 8 + (lane / 32) * 4 + i % 4.
#pragma once

#if DEV_GFX
template <u32 SIDE, u32 PER_LANE> struct MfmaLayout {
    enum : u32 { NA = PER_LANE, NB = PER_LANE, NC = SIDE * SIDE / 64 };
    DEV u32 a_row(u32) { return lane() % SIDE; }
    DEV u32 a_k(u32 i) { return lane() / SIDE * PER_LANE + i; }
    DEV u32 b_k(u32 i) { return lane() / SIDE * PER_LANE + i; }
    DEV u32 b_col(u32) { return lane() % SIDE; }
    DEV u32 c_row(u32 i) { return SIDE == 16 ? lane() / 16 * 4 + i : i / 4 * 8 + lane() / 32 * 4 + i % 4; }
    DEV u32 c_col(u32) { return lane() % SIDE; }
};
typedef MfmaLayout<32, 4> Mfma32x32x8;
typedef MfmaLayout<16, 8> Mfma16x16x32;   // half_t on gfx950; fp8 on gfx942 and gfx950
typedef MfmaLayout<32, 8> Mfma32x32x16;   // half_t on gfx950; fp8 on gfx942 and gfx950

struct f32x16 { float v[16]; };

#if DEV_AMD
#  if HALF_F16
typedef _Float16 MfmaHalfX4 __attribute__((ext_vector_type(4)));
typedef _Float16 MfmaHalfX8 __attribute__((ext_vector_type(8)));
#    define MFMA_32X32X8 __builtin_amdgcn_mfma_f32_32x32x8f16
#    define MFMA_16X16X32 __builtin_amdgcn_mfma_f32_16x16x32_f16
#    define MFMA_32X32X16 __builtin_amdgcn_mfma_f32_32x32x16_f16
#  else
typedef short MfmaHalfX4 __attribute__((ext_vector_type(4)));
#    if DEV_GFX >= 0x950
typedef __bf16 MfmaHalfX8 __attribute__((ext_vector_type(8)));
#    endif
#    define MFMA_32X32X8 __builtin_amdgcn_mfma_f32_32x32x8bf16_1k
#    define MFMA_16X16X32 __builtin_amdgcn_mfma_f32_16x16x32_bf16
#    define MFMA_32X32X16 __builtin_amdgcn_mfma_f32_32x32x16_bf16
#  endif
typedef float MfmaF32x4 __attribute__((ext_vector_type(4)));
typedef float MfmaF32x16 __attribute__((ext_vector_type(16)));
// c [32x32] += a [32x8] * b [8x32].
DEV void mfma_32x32x8(f32x16& c, const half_x4& a, const half_x4& b) {
    c = bits_as<f32x16>(
        MFMA_32X32X8(bits_as<MfmaHalfX4>(a), bits_as<MfmaHalfX4>(b), bits_as<MfmaF32x16>(c), 0, 0, 0));
}
#  if DEV_GFX >= 0x942
DEV void mfma_16x16x32(f32x4& c, const fp8x8& a, const fp8x8& b) {
    c = bits_as<f32x4>(__builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(
        bits_as<long>(a), bits_as<long>(b), bits_as<MfmaF32x4>(c), 0, 0, 0));
}
DEV void mfma_32x32x16(f32x16& c, const fp8x8& a, const fp8x8& b) {
    c = bits_as<f32x16>(__builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(
        bits_as<long>(a), bits_as<long>(b), bits_as<MfmaF32x16>(c), 0, 0, 0));
}
#  endif
#  if DEV_GFX >= 0x950
DEV void mfma_16x16x32(f32x4& c, const half_x8& a, const half_x8& b) {
    c = bits_as<f32x4>(
        MFMA_16X16X32(bits_as<MfmaHalfX8>(a), bits_as<MfmaHalfX8>(b), bits_as<MfmaF32x4>(c), 0, 0, 0));
}
DEV void mfma_32x32x16(f32x16& c, const half_x8& a, const half_x8& b) {
    c = bits_as<f32x16>(
        MFMA_32X32X16(bits_as<MfmaHalfX8>(a), bits_as<MfmaHalfX8>(b), bits_as<MfmaF32x16>(c), 0, 0, 0));
}
#  endif
#else
DEV void mfma_32x32x8(f32x16& c, const half_x4& a, const half_x4& b DEV_SITE) {
    emu::tile_product<Mfma32x32x8, 32, 32, 8>(c.v, a.v, b.v DEV_AT);
}
#  if DEV_GFX >= 0x942
DEV void mfma_16x16x32(f32x4& c, const fp8x8& a, const fp8x8& b DEV_SITE) {
    emu::tile_product<Mfma16x16x32, 16, 16, 32>(c.v, a.v, b.v DEV_AT);
}
DEV void mfma_32x32x16(f32x16& c, const fp8x8& a, const fp8x8& b DEV_SITE) {
    emu::tile_product<Mfma32x32x16, 32, 32, 16>(c.v, a.v, b.v DEV_AT);
}
#  endif
#  if DEV_GFX >= 0x950
DEV void mfma_16x16x32(f32x4& c, const half_x8& a, const half_x8& b DEV_SITE) {
    emu::tile_product<Mfma16x16x32, 16, 16, 32>(c.v, a.v, b.v DEV_AT);
}
DEV void mfma_32x32x16(f32x16& c, const half_x8& a, const half_x8& b DEV_SITE) {
    emu::tile_product<Mfma32x32x16, 32, 32, 16>(c.v, a.v, b.v DEV_AT);
}
#  endif
#endif
#endif
