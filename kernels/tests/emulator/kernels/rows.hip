// Test kernels: a row sum and an RMS norm with block reductions, and an elementwise product without
// reductions.
#include "dev.h"
#if !DEV_AMD
#  include "dev/bulk.h"
#endif

// y[r] = sum of row r. Grid: one block per row.
KERNEL(1024) row_sum(float* y, const float* x, u32 cols) {
    float sum = 0.f;
    for (u32 i = tid(); i < cols; i += bdim()) sum += x[(u64)bid_x() * cols + i];
    sum = block_sum(sum);
    if (tid() == 0) y[bid_x()] = sum;
}
EXPORT(row_sum)

// For each row r, y[2 r] = sum and y[2 r + 1] = sum of squares: the second reduction overwrites the shared
// memory of the first.
KERNEL(1024) sums_twice(float* y, const float* x, u32 cols) {
    const float* row = x + (u64)bid_x() * cols;
    float sum = 0.f, squares = 0.f;
    for (u32 i = tid(); i < cols; i += bdim()) {
        sum += row[i];
        squares += row[i] * row[i];
    }
    const float first = block_sum(sum), second = block_sum(squares);
    // All threads add their result, so that a wrong result in any thread is detected.
    atomic_add(y + 2 * bid_x(), first / (float)bdim());
    atomic_add(y + 2 * bid_x() + 1, second / (float)bdim());
}
EXPORT(sums_twice)

// y = x / sqrt(mean(x^2) + eps), divided by the largest magnitude of the result.
KERNEL(1024) norm_scaled(float* y, const float* x, u32 cols, float eps) {
    const float* row = x + (u64)bid_x() * cols;
    float* out = y + (u64)bid_x() * cols;
    float squares = 0.f, largest = 0.f;
    for (u32 i = tid(); i < cols; i += bdim()) squares += row[i] * row[i];
    const float scale = rsqrt_(block_sum(squares) / (float)cols + eps);
    for (u32 i = tid(); i < cols; i += bdim()) largest = fmax_(largest, fabs_(row[i] * scale));
    largest = block_max(largest);
    for (u32 i = tid(); i < cols; i += bdim()) out[i] = row[i] * scale / largest;
}
EXPORT(norm_scaled)

// y = a * b, for any grid size.
KERNEL(256) product(float* y, const float* a, const float* b, u32 n) {
    for (u32 i = bid_x() * bdim() + tid(); i < n; i += gdim_x() * bdim()) y[i] = a[i] * b[i];
}
EXPORT(product)

// count[0] = number of threads of the launch; the last block to arrive writes twice that to count[2].
KERNEL(256) count_threads(u32* count) {
    SHARED(u32, last, 1);
    atomic_add(count, 1u);
    sync();
    if (tid() == 0) last[0] = atomic_add_acq_rel(count + 1, 1u) == gdim_x() - 1;
    sync();
    if (last[0] && tid() == 0) count[2] = 2 * load_acquire(count);
}
EXPORT(count_threads)

// Blocks pass a token in reverse order: block i waits for the value gridDim - 1 - i, then writes the next
// value. Requires all blocks to run concurrently.
KERNEL(64) hand_on(u32* token) {
    const u32 mine = gdim_x() - 1 - bid_x();  // The last block begins.
    if (tid() == 0) {
        while (load_acquire(token) != mine) pause();
        store_release(token, mine + 1);
    }
    sync();
}
EXPORT(hand_on)

#if !DEV_AMD  // AMD has no barriers of this kind
// Two warps pass control to each other `times` times; turns[0] and turns[1] = times once both have finished.
KERNEL(128) take_turns(u32* turns, u32 times) {
    SHARED(Barrier, passed, 2);
    const u32 mine = tid() / WARP_SIZE;
    if (tid() == 0) {
        barrier_init(passed, 1);
        barrier_init(passed + 1, 1);
        barriers_ready();
    }
    sync();
    for (u32 round = 0; round < times; ++round) {
        if (mine == 1) barrier_wait(passed, round & 1);
        if (lane() == 0) barrier_arrive(passed + mine);
        if (mine == 0) barrier_wait(passed + 1, round & 1);
    }
    if (lane() == 0) turns[mine] = times;
}
EXPORT(take_turns)
#endif

// y[i] = i ^ 1, exchanged through shared memory by one warp.
KERNEL(64) swap(u32* y) {
    SHARED(u32, ids, 64);
    ids[tid()] = tid();
    warp_sync();  // before the swap
    y[tid()] = ids[tid() ^ 1];
}
EXPORT(swap)
