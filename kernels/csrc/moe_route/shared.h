// moe_route/shared.h - shared experts, which process every token.
#pragma once

// Appends the `shared` experts, with ids from `count` on and weight 1, to a token's chosen experts. Any
// number of threads may call it.
DEV void add_shared(i32* experts, float* weights, u32 count, u32 shared) {
    for (u32 i = tid(); i < shared; i += bdim()) {
        experts[i] = (i32)(count + i);
        weights[i] = 1.f;
    }
}
