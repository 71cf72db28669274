// dev/ring_stage.h - stages of a ring buffer in shared memory; two barriers (dev/bulk.h) per stage: full and
// empty.
//
//   release(b)                    lane 0 arrives at b for its warp
//   release_written(b)            release() after fence_async_shared(): what the warp wrote is visible to WGMMA
//                           (dev/wgmma.h)
//   PipelineState                 index of the current stage, and the parity of its phase for barrier_wait()
//   advance<COUNT>(t)             moves t to the next stage of a ring of COUNT stages
#pragma once
#include "dev/bulk.h"
#include "dev/wgmma.h"

DEV void release(Barrier* b) {
    if (lane() == 0) barrier_arrive(b);
}
DEV void release_written(Barrier* b) {
    fence_async_shared();
    warp_sync();
    release(b);
}

// Index of the current stage, and the parity of its phase for barrier_wait().
struct PipelineState { u32 stage, phase; };
template <u32 COUNT> DEV void advance(PipelineState& t) {
    t.stage = t.stage + 1 == COUNT ? 0 : t.stage + 1;
    t.phase ^= t.stage == 0;
}
