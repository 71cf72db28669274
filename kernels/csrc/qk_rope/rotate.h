// rotate.h - RoPE rotation of a pair of channels, for qk_rope and for attention kernels that fuse RoPE: same
// bits.
#pragma once

// (a, b) rotated by the angle of cosine c and sine s, not yet rounded.
DEV float turned_low(float a, float b, float c, float s) { return fma_(a, c, -(b * s)); }
DEV float turned_high(float a, float b, float c, float s) { return fma_(b, c, a * s); }
