// dev/ring_stage.h - stages of a ring in shared memory, whose use two barriers (dev/bulk.h) hand back and forth.
//
//   release(b)                    arrives, one for a warp
//   release_written(b)            the same behind what the warp wrote, for products (dev/wgmma.h) to read
//   RingStage, advance<COUNT>(t)  a stage of COUNT and the parity of its use, for barrier_wait()
#pragma once
#include "dev/bulk.h"
#include "dev/wgmma.h"

DEV void release(Barrier* b) {
    if (lane() == 0) barrier_arrive(b);
}
DEV void release_written(Barrier* b) {
    shared_fence();
    warp_sync();
    release(b);
}

struct RingStage { u32 stage, odd; };
template <u32 COUNT> DEV void advance(RingStage& t) {
    t.stage = t.stage + 1 == COUNT ? 0 : t.stage + 1;
    t.odd ^= t.stage == 0;
}
