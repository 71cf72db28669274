// dev/scalar.h - values that are the same on all lanes of a warp.
//
//   uniform(v)       returns v, which is the same on all lanes; on AMD in a scalar register
//   load_scalar(p)   loads global data that nothing writes while the kernel runs. On AMD the scalar unit loads it if
//                    p is the same on all lanes. Vector loads complete in order, so that a wait for the newest one
//                    waits for all of them; scalar loads are waited for separately
#pragma once

#if DEV_AMD
DEV u32 uniform(u32 v) { return (u32)__builtin_amdgcn_readfirstlane((int)v); }
template <class V> DEV V load_scalar(const V* p) { return *(const __attribute__((address_space(4))) V*)(u64)p; }
#else
DEV u32 uniform(u32 v) { return v; }
template <class V> DEV V load_scalar(const V* p) { return *p; }
#endif
