// dev.h - the one header of every kernel: the same source compiles with clang -x hip and hiprtc (gfx90a, gfx942,
// gfx950), with NVRTC and nvcc (sm_90a), and as plain C++17 for the SIMT emulator (-DDEV_EMU=1 -DWARP_SIZE=64|32).
//
// Attributes, compiler builtins and inline PTX only: no vendor header, no vendor type, no device library.
//
//   dev.h             this file: integer types, what every target offers, detection of the target
//   dev/amd.h         ids, barriers, shuffles, maths, atomics, loads on AMD
//   dev/nvidia.h      ids, barriers, shuffles, maths, atomics, loads on NVIDIA
//   emu.h             the same for the emulator (kernels/emu/emu.h; the emulator's hiprtc supplies it)
//   dev/half.h        half_t, the 16-bit type: bf16, or f16 with -DHALF_F16=1
//   dev/vector.h      vectors, ACT, conversion, 8-wide loads and stores
//   dev/fp8.h         fp8 e4m3, both formats: OCP and FNUZ
//   dev/collective.h  shuffles of any type; sum and max reductions over groups of lanes, warps and blocks
//   dev/matrix.h      16x16x16 half_t MMA tiles, their fragment layouts, fragment loads from shared memory
//   dev/mfma.h        further AMD MFMA builtins, also on the emulator
// Further headers, included by kernels that need them: dev/strip.h (MMA on operands loaded straight from
// global memory), dev/bulk.h and dev/tensor_map.h (NVIDIA bulk copies and TMA), dev/wgmma.h (NVIDIA WGMMA),
// dev/peer.h (memory shared by several GPUs).
//
// A kernel:
//
//     #include "dev.h"
//     // y[r] = sum of row r of x [rows, cols]. Grid: rows. Block: any multiple of WARP_SIZE.
//     KERNEL(256) row_sum(float* y, const float* x, u32 cols) {
//         float sum = 0.f;
//         for (u32 i = tid(); i < cols; i += bdim()) sum += x[(u64)bid_x() * cols + i];
//         sum = block_sum(sum);
//         if (tid() == 0) y[bid_x()] = sum;
//     }
//     EXPORT(row_sum)
//
// What every target offers (DEV is the prefix of a device function):
//   KERNEL(max_threads) name(args...)  entry point; blocks have one dimension and at most max_threads threads
//   EXPORT(name)            after every entry point, at namespace scope
//   SHARED(T, name, count)  static shared array; inside a function; never initialised (the emulator fills it
//                           with NaN); has the alignment of T only: tiles and 16-byte copies need a T of 16
//                           bytes
//   DYN_SHARED(T, name)     the launch's dynamic shared memory, aligned to 16 bytes
//   WARP_SIZE               lanes of a warp (NVIDIA) or wavefront (AMD): 32 or 64. Both are called warps in
//                           these files
//   tid() bdim() lane() warp_id() bid_x|y|z() gdim_x|y|z()
//   sync()                  block barrier; every thread of the block must call it
//   wait_shared()           waits for this warp's accesses to shared memory. sync() does so as well, unless clang 22
//                           drops the wait on AMD, which happens where a loop with such writes ends at sync()
//   warp_sync()             orders shared memory between the lanes of a warp; every lane must call it
//   shfl_u32(v, lane)  warp_ballot(bool) -> u64;  warp_any and warp_all: dev/collective.h
//   exp2_ log2_ sqrt_ rsqrt_ rcp_ fma_ fmax_ fmin_ fabs_  on f32; the underscore avoids the compilers' own
//                           names. exp2_, log2_, rsqrt_, rcp_ are hardware instructions, accurate to about 2
//                           ulp
//   atomic_add(u32*|float*, v) atomic_max(u32*, v) atomic_cas(u32*, expected, wanted) -> old value; relaxed,
//                           device scope
//   atomic_add_acq_rel(u32*, v) load_acquire(u32*) store_release(u32*, v) fence()   order the accesses to
//                           other memory, device scope
//   pause()                 inside a spin loop that waits for another block or lane
//   load_const<V>(p)        global data that nothing writes while this kernel or the previous one runs (weights,
//                           tables)
//   load_stream<V>(p)       as load_const, for data that is read once: no allocation in the L1 cache
//   store_stream<V>(p, v)   global data that is not read soon. V of all three has 4, 8 or 16 bytes and is
//                           aligned to its size
//   cp_async16(shared, global)  starts a 16-byte cp.async; cp_async16_zfill(shared, global, bool) writes zeros if
//                           false; cp_async4: 4 bytes
//   cp_async_commit() cp_async_wait<N>()  closes a cp.async group; waits until at most N groups of this thread are
//                           pending. sync() is needed before other threads read the copies
//   grid_wait()             waits for the previous kernel under programmatic dependent launch; needed before
//                           reading its output
//   grid_launch_dependents()  allows the next kernel to start; the next kernel still waits in its grid_wait()
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#if defined(DEV_EMU)
#elif defined(__HIP__) || defined(__HIPCC_RTC__) || defined(__AMDGCN__)
#  define DEV_AMD 1
#elif defined(__CUDACC__) || defined(__CUDACC_RTC__) || defined(__CUDA__)
#  define DEV_NV 1
#else
#  error "dev.h: unknown target"
#endif

// DEV_GFX: the AMD architecture as a hexadecimal number (0x90a, 0x942, 0x950), 0 elsewhere. On the emulator
// -DDEV_EMU_GFX=0x942 runs that architecture's branches; without it, the portable ones.
#if defined(__gfx90a__)
#  define DEV_GFX 0x90a
#elif defined(__gfx942__)
#  define DEV_GFX 0x942
#elif defined(__gfx950__)
#  define DEV_GFX 0x950
#elif defined(DEV_EMU_GFX)
#  define DEV_GFX DEV_EMU_GFX
#else
#  define DEV_GFX 0
#endif

// DEV_SM: the NVIDIA architecture (900 on Hopper), 0 elsewhere.
#if DEV_NV
#  define DEV_SM __CUDA_ARCH__
#else
#  define DEV_SM 0
#endif

// UNROLL is put before a loop over arrays that must be in registers: full unrolling makes every index a
// constant.
#if DEV_EMU
#  define UNROLL
#else
#  define UNROLL _Pragma("unroll")
#endif

#if DEV_AMD
#  include "dev/amd.h"
#elif DEV_NV
#  include "dev/nvidia.h"
#else
#  include "emu.h"
#endif
#include "dev/vector.h"
#include "dev/fp8.h"
#include "dev/collective.h"
#include "dev/matrix.h"
#include "dev/mfma.h"
