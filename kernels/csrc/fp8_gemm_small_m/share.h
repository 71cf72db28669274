// fp8_gemm_small_m/share.h - work of a block of stream.h: its strips of W (STRIP_ROWS rows each), its slabs
// (SLAB columns of the strips of a pass), and its shared memory layout. Like gemm_small_m/share.h, but with
// fp8 weights, their scales, and rows of x in f16.
#pragma once

enum : u32 {
    COMPUTE_WARPS = 8,        // consumer warps
    PRODUCER_WARPS = 4,       // producer warps: issuing a bulk copy costs a warp 40 ns, whatever its size
    CONSUMER_THREADS = COMPUTE_WARPS * WARP_SIZE,
    SPAN = SLAB / COMPUTE_WARPS,  // number of k per warp in a slab
    BLOCK_K = 128,                // number of k that share a scale
    LINE = SLAB + 64,             // bytes per slab row, padded: alternate rows use different banks
    X_LINE = SLAB * 2 + 16,       // bytes of a row of x, padded by four banks
    LINES = TILES * STRIP_ROWS,
    PAIRS = (TILES + 1) / 2,  // pairs of strips per pass
    OCTETS = MORE_ROWS ? 2 : 1,  // groups of 8 rows of x
    MOST_STAGES = 16,
    MOST_ROWS = 16,
    HALVES = GATED ? 2 : 1,
    WIDTH = STRIP_ROWS / HALVES  // outputs per strip
};

// Work of a block: its strips of W (STRIP_ROWS rows each), and the sizes of the GEMM.
struct BlockWork {
    const fp8* w;
    u32 n, k, m;
    u32 first, strips;  // first strip and number of strips of this block
};
DEV u32 outputs(const BlockWork& w) { return w.n / HALVES; }
DEV u32 slabs(const BlockWork& w) { return (w.k + SLAB - 1) / SLAB; }
DEV u32 blocks_k(u32 k) { return (k + BLOCK_K - 1) / BLOCK_K; }
DEV u32 passes(const BlockWork& w) { return (w.strips + TILES - 1) / TILES; }
DEV u32 strips_of(const BlockWork& w, u32 pass) {
    const u32 left = w.strips - pass * TILES;
    return left < TILES ? left : (u32)TILES;
}
DEV u32 columns(const BlockWork& w, u32 slab) {
    const u32 left = w.k - slab * SLAB;
    return left < SLAB ? left : (u32)SLAB;
}
// Returns the index in a ring-buffer stage of row r of strip t. A stage first has the rows of W of all
// outputs of the pass; with GATED these are the gate rows, and the up rows of the same outputs follow.
DEV u32 line_of(u32 strips, u32 t, u32 r) { return t * WIDTH + r % WIDTH + (r < WIDTH ? 0 : strips * WIDTH); }
DEV u32 first_output(const BlockWork& w, u32 pass) { return (w.first + pass * TILES) * WIDTH; }
// Returns the index in W of row `line` of a ring-buffer stage, for the given pass. Rows beyond the last
// output repeat the row of the last output; their results are not stored.
DEV u64 weight_row(const BlockWork& w, u32 pass, u32 line) {
    const u32 half = strips_of(w, pass) * WIDTH, out = first_output(w, pass) + (line < half ? line : line - half);
    return (out < outputs(w) ? out : outputs(w) - 1) + (line < half ? 0 : outputs(w));
}

DEV BlockWork even_share(const fp8* w, u32 n, u32 k, u32 m) {
    const u32 all = (n / HALVES + WIDTH - 1) / WIDTH, each = all / gdim_x(), more = all - each * gdim_x();
    const u32 first = bid_x() * each + (bid_x() < more ? bid_x() : more);
    return BlockWork{w, n, k, m, first, each + (bid_x() < more)};
}
// Returns the maximum number of strips (STRIP_ROWS rows of W each) over all blocks of the grid.
DEV u32 most_strips(u32 n) {
    const u32 all = (n / HALVES + WIDTH - 1) / WIDTH;
    return (all + gdim_x() - 1) / gdim_x();
}

// Stride in bytes of rows of x in shared memory if all of x is stored there (without X_SLABS).
DEV u32 x_line(u32 k) { return (k * 2 + 127) / 128 * 128 + 16; }

// Layout of the launch's dynamic shared memory.
struct SharedMemoryLayout {
    Barrier *full, *empty, *rows;
    float *squares, *peaks, *factors, *sums, *scales;
    u8 *x, *ring;
    u32 stages, stage_bytes;
};
DEV SharedMemoryLayout shared_layout(u8* shared, u32 m, u32 n, u32 k) {
    SharedMemoryLayout s;
    s.full = (Barrier*)shared;
    s.empty = s.full + MOST_STAGES;
    s.rows = s.empty + MOST_STAGES;
    s.squares = (float*)(s.rows + 2);
    s.peaks = s.squares + COMPUTE_WARPS * MOST_ROWS;
    s.factors = s.peaks + COMPUTE_WARPS * MOST_ROWS;
    s.sums = s.factors + MOST_ROWS;
    s.scales = s.sums + COMPUTE_WARPS * LINES * m;
    u8* at = (u8*)(s.scales + (CHANNELS ? 0 : (most_strips(n) * HALVES * blocks_k(k) + 3) / 4 * 4));
    s.x = at;
    at += X_SLABS ? 0 : m * x_line(k);
    s.ring = at;
    s.stage_bytes = LINES * LINE + (X_SLABS ? m * X_LINE : 0);
    const u32 fit = (dynamic_shared_bytes() - (u32)(at - shared)) / s.stage_bytes;
    s.stages = fit < MOST_STAGES ? fit : (u32)MOST_STAGES;
    return s;
}
