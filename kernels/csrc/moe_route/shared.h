// moe_route/shared.h - shared experts, which process every token.
#pragma once

// Writes the `shared` shared experts of a token, with ids from `count` on and weight 1. Called by all threads
// of a block, which may have any size.
DEV void add_shared(i32* experts, float* weights, u32 count, u32 shared) {
    for (u32 i = tid(); i < shared; i += bdim()) {
        experts[i] = (i32)(count + i);
        weights[i] = 1.f;
    }
}
