// moe/bias.h - biases of expert projections. -DBIASED=1: the kernel has the argument `bias`, f32 [experts][rows of
// W], which is added to the product before anything else.
#pragma once
#include "moe/segment.h"

#ifndef BIASED
#  define BIASED 0
#endif
#if BIASED
#  define BIAS_PARAM , const float* bias
#  define ADD_BIAS(sum, expert, row) ((sum) + bias[(u64)(expert) * n + (row)])
#  define BIAS_ARG bias
#else
#  define BIAS_PARAM
#  define ADD_BIAS(sum, expert, row) (sum)
#  define BIAS_ARG nullptr
#endif

// Biases of a projection of all experts, f32 [experts][n]; not read unless BIASED.
struct ExpertBiases { const float* bias; u32 n; };
DEV float bias_of(const ExpertBiases& b, u32 expert, u32 row) { return BIASED ? b.bias[(u64)expert * b.n + row] : 0.f; }
DEV float add_bias(float sum, float bias) { return BIASED ? sum + bias : sum; }
