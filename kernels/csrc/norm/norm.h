// norm.h - RMS norm arithmetic, for the norm kernels and for kernels that fuse one.
// Rounding points, as in cpu/norm.rs: x + delta is rounded to ACT before it is squared; x * scale is rounded
// to ACT before the multiplication by the weight; the product is rounded when it is stored. Squares are
// summed in f32.
#pragma once

// 1 / sqrt(mean of squares + eps).
DEV float inverse_rms(float squares, u32 cols, float eps) { return rsqrt_(squares / (float)cols + eps); }

// One normalised element, not yet rounded for the store.
DEV float normed(float x, float scale, float w) { return w * f32(to<ACT>(x * scale)); }

// Value of the residual stream after an addition: rounded.
DEV float residual_sum(float x, float delta) { return f32(to<ACT>(x + delta)); }
