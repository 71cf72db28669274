// attention_decode/last_block.h - determines the block that merges the splits of a head: the last one to
// arrive.
#pragma once

// Shared flag, whether all splits of the head have arrived; valid after a barrier that follows count_arrival().
DEV u32* last_arrival() {
    SHARED(u32, last, 1);
    return last;
}

// Orders the stores of all threads of the team before a following count_arrival().
DEV void publish() {
#if !DEV_NV  // On NVIDIA an atomic operation of one thread publishes what a barrier has ordered before it.
    fence();
#endif
    team_sync();
}

// Counts `done` splits of a head as arrived. The atomic's result takes a round trip to L2, for which the
// other threads wait only at the next barrier.
DEV void count_arrival(u32* arrived, u32 done, u32 splits) {
    if (tid() != 0) return;
    const bool last = atomic_add_acq_rel(arrived, done) + done == splits;
    if (last) arrived[0] = 0;
    last_arrival()[0] = last;
}

// Returns the result of count_arrival(), after a barrier. If true, the records of all splits may be read.
DEV bool was_last() {
#if !DEV_NV
    fence();
#endif
    return last_arrival()[0];
}

// Whether this team, which has finished `done` of a head's splits, is the last team to do so. Every thread
// must call it.
DEV bool is_last(u32* arrived, u32 done, u32 splits) {
    publish();
    if (done == splits) return true;
    count_arrival(arrived, done, splits);
    team_sync();
    return was_last();
}
