// norm.h - RMS norm arithmetic, for the norm kernels and for kernels that fuse one.
// Rounding points, as in cpu/norm.rs: x + delta is rounded to ACT before it is squared; x * scale is rounded
// to ACT before the multiplication by the weight; the product is rounded when it is stored. Squares are
// summed in f32.
//
//   -DNORM_F32=1  weights are f32 and ACT is half_t; x * scale is not rounded before the multiplication
#pragma once
#ifndef NORM_F32
#  define NORM_F32 0
#endif
#if NORM_F32
typedef float NORM_WEIGHT;
#else
typedef ACT NORM_WEIGHT;
#endif

// Returns 1 / sqrt(squares / cols + eps), where `squares` is the sum of squares.
DEV float inverse_rms(float squares, u32 cols, float eps) { return rsqrt_(squares / (float)cols + eps); }

// Returns one normalised element, not yet rounded for the store.
#if NORM_F32
DEV float normed(float x, float scale, float w) { return w * (x * scale); }
#else
DEV float normed(float x, float scale, float w) { return w * f32(to<ACT>(x * scale)); }
#endif

// Returns the value of the residual stream after adding `delta`, rounded to ACT.
DEV float residual_sum(float x, float delta) { return f32(to<ACT>(x + delta)); }
