// attention_decode/last.h - which block merges the splits of a head: the last one to bring some.
#pragma once

// Whether this team, which brings `done` splits of a head, is the last to bring some. Every thread must come.
DEV bool is_last(u32* arrived, u32 done, u32 splits) {
    SHARED(u32, last, 1);
#if !DEV_NV  // There, what a barrier has ordered before an atomic operation of one thread, that operation publishes.
    fence();
#endif
    team_sync();
    if (done == splits) return true;
    if (tid() == 0) {
        last[0] = atomic_add_acq_rel(arrived, done) + done == splits;
        if (last[0]) arrived[0] = 0;
    }
    team_sync();
#if !DEV_NV
    fence();
#endif
    return last[0];
}
