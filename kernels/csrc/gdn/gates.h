// gdn/gates.h - gates of the gated delta rule.
#pragma once
#include "dev.h"

DEV float sigmoid(float x) { return rcp_(1.f + exp2_(-1.44269504f * x)); }

// Returns ln(1 + e^x).
DEV float softplus(float x) {
    const float e = exp2_(1.44269504f * x);
    const float small = e * fma_(e, fma_(e, 0.333333333f, -0.5f), 1.f);
    const float large = 0.693147181f * log2_(1.f + e);
    return x > 20.f ? x : (e < 0.01f ? small : large);
}

// Returns the decay rate of a head, exp(a_log).
DEV float decay_rate(float a_log) { return exp2_(1.44269504f * a_log); }
// Returns the logarithm to base 2 of the factor by which a token shrinks the state of a head.
DEV float log2_decay(float rate, float x) { return -1.44269504f * rate * softplus(x); }
