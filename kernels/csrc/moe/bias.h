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
#else
#  define BIAS_PARAM
#  define ADD_BIAS(sum, expert, row) (sum)
#endif
