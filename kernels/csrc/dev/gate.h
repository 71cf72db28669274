// dev/gate.h - activation function of a gated MLP, selected by defines:
//
//   -DGATE=0  silu(gate) * up (the default)
//   -DGATE=1  gelu(gate) * up, tanh approximation: gelu(x) = x / 2 (1 + tanh z) = x sigmoid(2 z) with
//             z = sqrt(2 / pi) (x + 0.044715 x^3)
//   -DGATE=2  (up + 1) * gate * sigmoid(alpha * gate), gate bounded above by limit, |up| bounded by limit
//   -DGATE_ALPHA=..  -DGATE_LIMIT=..   bits of the f32 parameters of GATE=2
#pragma once
#ifndef GATE
#  define GATE 0
#endif

// The activation is activated(gate) * up_factor(up), in f32. NaN stays NaN.
#if GATE == 0
DEV float activated(float x) { return x * rcp_(1.f + exp2_(-1.44269504f * x)); }
DEV float up_factor(float up) { return up; }
#elif GATE == 1
DEV float activated(float x) {
    return x * rcp_(1.f + exp2_(-2.f * 1.44269504f * 0.797884561f * x * (1.f + 0.044715f * x * x)));
}
DEV float up_factor(float up) { return up; }
#else
DEV float activated(float x) {
    const float alpha = bits_as<float>(u32(GATE_ALPHA)), limit = bits_as<float>(u32(GATE_LIMIT));
    const float gate = x > limit ? limit : x;
    return gate * rcp_(1.f + exp2_(-1.44269504f * alpha * gate));
}
DEV float up_factor(float up) {
    const float limit = bits_as<float>(u32(GATE_LIMIT));
    return 1.f + (up > limit ? limit : up < -limit ? -limit : up);
}
#endif
