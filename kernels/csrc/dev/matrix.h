// dev/matrix.h - the 16x16x16 half_t MMA tile of every target: C (f32) += A * B.
// FragLayout defines the fragment layout: element i of this lane is A[a_row(i)][a_k(i)], B[b_k(i)][b_col(i)],
// C[c_row(i)][c_col(i)]. Code that takes its indices from FragLayout is portable.
#pragma once

#if WARP_SIZE == 64
// Fragment layout of v_mfma_f32_16x16x16_bf16 and _f16 of gfx90a, gfx942, gfx950. The C fragment has the
// layout of a B fragment.
struct FragLayout {
    enum : u32 { NA = 4, NB = 4, NC = 4 };
    DEV u32 a_row(u32) { return lane() & 15; }
    DEV u32 a_k(u32 i) { return (lane() >> 4) * 4 + i; }
    DEV u32 b_k(u32 i) { return (lane() >> 4) * 4 + i; }
    DEV u32 b_col(u32) { return lane() & 15; }
    DEV u32 c_row(u32 i) { return (lane() >> 4) * 4 + i; }
    DEV u32 c_col(u32) { return lane() & 15; }
};
#else
// Fragment layout of two mma.sync.m16n8k16 of sm_80 and later. The C fragment has the layout of an A
// fragment.
struct FragLayout {
    enum : u32 { NA = 8, NB = 8, NC = 8 };
    DEV u32 a_row(u32 i) { return (lane() >> 2) + ((i >> 1) & 1) * 8; }
    DEV u32 a_k(u32 i) { return (lane() & 3) * 2 + (i & 1) + (i >> 2) * 8; }
    DEV u32 b_k(u32 i) { return (lane() & 3) * 2 + (i & 1) + ((i >> 1) & 1) * 8; }
    DEV u32 b_col(u32 i) { return (lane() >> 2) + (i >> 2) * 8; }
    DEV u32 c_row(u32 i) { return (lane() >> 2) + ((i >> 1) & 1) * 8; }
    DEV u32 c_col(u32 i) { return (lane() & 3) * 2 + (i & 1) + (i >> 2) * 8; }
};
#endif
struct alignas(8) FragA { half_t x[FragLayout::NA]; };
struct alignas(8) FragB { half_t x[FragLayout::NB]; };
struct FragC { float x[FragLayout::NC]; };

DEV FragC zero_c() {
    FragC c;
    for (u32 i = 0; i < FragLayout::NC; ++i) c.x[i] = 0.f;
    return c;
}

#if DEV_AMD
DEV void mma16(FragC& c, const FragA& a, const FragB& b) {
    typedef float F32x4 __attribute__((ext_vector_type(4)));
#  if HALF_F16
    typedef _Float16 HalfX4 __attribute__((ext_vector_type(4)));
    const F32x4 sum = __builtin_amdgcn_mfma_f32_16x16x16f16(
#  else
    typedef short HalfX4 __attribute__((ext_vector_type(4)));
    const F32x4 sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(
#  endif
        __builtin_bit_cast(HalfX4, a), __builtin_bit_cast(HalfX4, b), __builtin_bit_cast(F32x4, c), 0, 0, 0);
    c = __builtin_bit_cast(FragC, sum);
}
#elif DEV_NV
// An A or B fragment as 32-bit registers, the operands of the mma instruction.
struct FragWords { u32 v[4]; };
DEV void mma16(FragC& c, const FragA& a, const FragB& b) {
    const FragWords aw = bits_as<FragWords>(a), bw = bits_as<FragWords>(b);
    for (u32 h = 0; h < 2; ++h)
        asm("mma.sync.aligned.m16n8k16.row.col.f32." HALF_PTX "." HALF_PTX ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(c.x[4 * h]), "+f"(c.x[4 * h + 1]), "+f"(c.x[4 * h + 2]), "+f"(c.x[4 * h + 3])
            : "r"(aw.v[0]), "r"(aw.v[1]), "r"(aw.v[2]), "r"(aw.v[3]), "r"(bw.v[2 * h]), "r"(bw.v[2 * h + 1]));
}
#else
DEV void mma16(FragC& c, const FragA& a, const FragB& b DEV_SITE) {
    emu::tile_product<FragLayout, 16, 16, 16>(c.x, a.x, b.x DEV_AT);
}
#endif

// Functions that load MMA fragments from shared memory. `tile`: address of the first element of the tile.
// `stride`: distance between rows, in elements; rows are aligned to 16 bytes. Every lane of the warp must
// call these functions.
#if DEV_NV
DEV FragWords ldmatrix(const half_t* row) {
    FragWords w;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3]) : "r"(shared_address(row)) : "memory");
    return w;
}
DEV FragWords ldmatrix_trans(const half_t* row) {
    FragWords w;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3]) : "r"(shared_address(row)) : "memory");
    return w;
}
// Loads A from memory laid out as [row][k].
DEV FragA load_a(const half_t* tile, u32 stride) {
    return bits_as<FragA>(ldmatrix(tile + (lane() & 15) * stride + (lane() >> 4) * 8));
}
// Loads B from memory laid out as [column][k], the layout of weights and of keys.
DEV FragB load_b(const half_t* tile, u32 stride) {
    const u32 column = (lane() & 7) + (lane() >> 4) * 8, k = (lane() >> 3 & 1) * 8;
    return bits_as<FragB>(ldmatrix(tile + column * stride + k));
}
// Loads B from memory laid out as [k][column], the layout of values.
DEV FragB load_b_trans(const half_t* tile, u32 stride) {
    return bits_as<FragB>(ldmatrix_trans(tile + (lane() & 15) * stride + (lane() >> 4) * 8));
}
#else
#if DEV_EMU
DEV void check_rows(const half_t* tile, u32 stride) {
    if ((u64)tile % 16 != 0 || stride % 8 != 0) emu::rule_violated("rows of a tile are not aligned to 16 bytes");
}
#else
DEV void check_rows(const half_t*, u32) {}
#endif
DEV FragA load_a(const half_t* tile, u32 stride) {
    check_rows(tile, stride);
    FragA a;
    for (u32 i = 0; i < FragLayout::NA; ++i) a.x[i] = tile[FragLayout::a_row(i) * stride + FragLayout::a_k(i)];
    return a;
}
DEV FragB load_b(const half_t* tile, u32 stride) {
    check_rows(tile, stride);
    FragB b;
    for (u32 i = 0; i < FragLayout::NB; ++i) b.x[i] = tile[FragLayout::b_col(i) * stride + FragLayout::b_k(i)];
    return b;
}
DEV FragB load_b_trans(const half_t* tile, u32 stride) {
    check_rows(tile, stride);
    FragB b;
    for (u32 i = 0; i < FragLayout::NB; ++i) b.x[i] = tile[FragLayout::b_k(i) * stride + FragLayout::b_col(i)];
    return b;
}
#endif
