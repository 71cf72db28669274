// moe_route/shared.h - experts that every token goes to.
#pragma once

// Behind the experts that a token chose among `count`: the `shared` ones behind all of those, with weight 1. Every thread may come.
DEV void add_shared(i32* experts, float* weights, u32 count, u32 shared) {
    for (u32 i = tid(); i < shared; i += bdim()) {
        experts[i] = (i32)(count + i);
        weights[i] = 1.f;
    }
}
