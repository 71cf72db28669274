// rotate.h - the rotation of a pair of channels: for this kernel and for attention that rotates by itself, to the same bits.
#pragma once

// (a, b) turned by the angle of cosine c and sine s, not yet rounded.
DEV float turned_low(float a, float b, float c, float s) { return fma_(a, c, -(b * s)); }
DEV float turned_high(float a, float b, float c, float s) { return fma_(b, c, a * s); }
