// attention_decode/last_block.h - determines which block merges the splits of a head: the block that finishes
// its splits of the head last.
#pragma once

// Returns a flag in shared memory: whether the partial results of all splits of the head have been stored. It
// is valid after a barrier that follows count_arrival().
DEV u32* last_arrival() {
    SHARED(u32, last, 1);
    return last;
}

// Makes the stores of all threads of the team (all warps of the block that process splits) visible to other
// blocks before a following count_arrival().
DEV void publish() {
#if !DEV_NV  // On NVIDIA an atomic operation of one thread publishes what a barrier has ordered before it.
    fence();
#endif
    team_sync();
}

// Adds `done` to the counter `arrived` of finished splits of a head. Only thread 0 waits for the result of
// the atomic operation (a round trip to L2); the other threads wait at the next barrier.
DEV void count_arrival(u32* arrived, u32 done, u32 splits) {
    if (tid() != 0) return;
    const bool last = atomic_add_acq_rel(arrived, done) + done == splits;
    if (last) arrived[0] = 0;
    last_arrival()[0] = last;
}

// Returns whether count_arrival() found that all splits of the head are finished; called after a barrier that
// follows count_arrival(). If true, the partial results of all splits may be read.
DEV bool was_last() {
#if !DEV_NV
    fence();
#endif
    return last_arrival()[0];
}

// Counts `done` splits of a head as finished by this team (the warps of a block that process splits); returns
// whether all `splits` splits of the head are now finished. Every thread of the team must call it.
DEV bool is_last(u32* arrived, u32 done, u32 splits) {
    publish();
    if (done == splits) return true;
    count_arrival(arrived, done, splits);
    team_sync();
    return was_last();
}
