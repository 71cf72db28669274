// Uses every function of dev.h once, so that the compile gate compiles all of them for every target.
#include "dev.h"

KERNEL(256) everything(float* out, const half_t* in, const float* in_f32, const fp8* in_fp8, u32* words, u32 n) {
    SHARED(half_t, tile, 16 * 24);
    DYN_SHARED(float, dynamic);
    grid_wait();
    const u32 t = tid() + bid_x() + bid_y() + bid_z() + gdim_x() + gdim_y() + gdim_z() + warp_id();
    f32x8 a = load8(in + 8 * t), b = load8(in_f32 + 8 * t), c = load8(in_fp8 + 8 * t);
    const f32x8 d = load8_stream(in + 8 * t), e = load8_stream(in_f32 + 8 * t), g = load8_stream(in_fp8 + 8 * t);
    for (u32 i = 0; i < 8; ++i) {
        a.v[i] = fma_(a.v[i], b.v[i], exp2_(c.v[i]) + log2_(d.v[i]) + sqrt_(e.v[i]) + rsqrt_(g.v[i]));
        b.v[i] = fmax_(rcp_(a.v[i]), fmin_(b.v[i], fabs_(c.v[i])));
    }
    cp_async16(tile + 8 * (tid() % 48), in + 8 * t);
    cp_async_commit();
    cp_async16_zfill(tile + 8 * (tid() % 48), in + 8 * t, t < n);
    cp_async_commit();
    cp_async_wait<0>();
    sync();
    FragC sum = zero_c();
    mma16(sum, load_a(tile, 24), load_b(tile, 24));
    mma16(sum, load_a(tile, 24), load_b_trans(tile, 24));
    grid_launch_dependents();
    dynamic[tid()] = block_sum(sum.x[0]) + block_max(sum.x[1]) + (float)block_sum(t) + group_sum<8>(sum.x[2]);
    warp_sync();
    float r = dynamic[tid() ^ 1] + shfl_xor(a.v[0], 3) + shfl(b.v[1], 5) + (float)shfl((u64)t, 1) + (float)shfl((i32)t, 2);
    if (warp_any(r > 0.f) && !warp_all(r > 1.f)) r += 1.f;
    atomic_add(words, 1u);
    atomic_add(out, r);
    atomic_max(words + 1, t);
    atomic_cas(words + 2, 0u, t);
    fence();
    if (atomic_add_acq_rel(words + 3, 1u) == 0) store_release(words + 4, 1u);
    while (load_acquire(words + 4) == 0) pause();
    store_stream((f32x4*)out + t, load_const((const f32x4*)in_f32 + t));
    store_stream((f32x2*)out + t, load_stream((const f32x2*)in_f32 + t));
    store_stream(out + t, load_stream(in_f32 + t) + load_const(in_f32 + t));
    store8(out + 8 * t, a);
    store8((half_t*)out + 8 * t, b);
    store8((fp8*)out + 8 * t, a);
    ((ACT*)out)[t] = to<ACT>(r + f32(to<fp8>(r)) + f32(to<half_t>(r)) + f32(to<float>(r)));
#if DEV_GFX
    f32x16 wide{};
    mfma_32x32x8(wide, *(const half_x4*)in, *(const half_x4*)(in + 4));
#  if DEV_GFX >= 0x942
    f32x4 quad{};
    mfma_16x16x32(quad, *(const fp8x8*)in_fp8, *(const fp8x8*)(in_fp8 + 8));
    mfma_32x32x16(wide, *(const fp8x8*)in_fp8, *(const fp8x8*)(in_fp8 + 8));
    out[0] = quad.v[0];
#  endif
#  if DEV_GFX >= 0x950
    mfma_16x16x32(quad, *(const half_x8*)in, *(const half_x8*)(in + 8));
    mfma_32x32x16(wide, *(const half_x8*)in, *(const half_x8*)(in + 8));
    out[1] = quad.v[0];
#  endif
    out[2] = wide.v[0];
#endif
}
EXPORT(everything)
