// attention_decode/last_block.h - which block merges the splits of a head: the last one to bring some.
#pragma once

// Whether everyone has brought theirs, once a barrier has followed announce().
DEV u32* all_there() {
    SHARED(u32, last, 1);
    return last;
}

// Orders what all threads have stored before what follows.
DEV void publish() {
#if !DEV_NV  // There, what a barrier has ordered before an atomic operation of one thread, that operation publishes.
    fence();
#endif
    team_sync();
}

// Tells that this team has brought `done` splits of a head. The answer is a trip to memory away: nobody waits for it here.
DEV void announce(u32* arrived, u32 done, u32 splits) {
    if (tid() != 0) return;
    const bool last = atomic_add_acq_rel(arrived, done) + done == splits;
    if (last) arrived[0] = 0;
    all_there()[0] = last;
}

// What announce() found out. A barrier has followed it; everything that others have brought may be read if this is true.
DEV bool was_last() {
#if !DEV_NV
    fence();
#endif
    return all_there()[0];
}

// Whether this team, which brings `done` splits of a head, is the last to bring some. Every thread must come.
DEV bool is_last(u32* arrived, u32 done, u32 splits) {
    publish();
    if (done == splits) return true;
    announce(arrived, done, splits);
    team_sync();
    return was_last();
}
