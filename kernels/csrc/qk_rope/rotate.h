// rotate.h - RoPE rotation of a pair of channels, shared by qk_rope and attention kernels that fuse RoPE, so
// that their results are bit-identical.
#pragma once

// Return the low and the high channel of (a, b), rotated by the angle with cosine c and sine s, not yet
// rounded.
DEV float rotated_low(float a, float b, float c, float s) { return fma_(a, c, -(b * s)); }
DEV float rotated_high(float a, float b, float c, float s) { return fma_(b, c, a * s); }
