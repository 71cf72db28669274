// skinny: y [M, N] = x [M, K] W [N, K]^T for M <= 16, where reading W once is all the time there is.
// CPU twin: `linear`, preceded by `rms_norm` (NORM) and followed by `silu_mul` (GATED) or `add` (RESIDUAL).
//
// A block owns TILES strips of rows of W and all of K; its waves take chunks of 128 k in turn, so that every
// wave streams 256 consecutive bytes of each row, straight into the matrix unit. DEPTH strips are in flight before
// the first is used, and before the kernel in front has ended: weights do not depend on it. The waves' sums meet in
// shared memory in ascending order.
//
// Order of a sum: within a chunk ascending, then the wave's chunks ascending, then waves ascending: it depends on
// K and the number of waves alone, so a row gives the same bits whatever M is and wherever it lies.
//
// Rounding: x after the norm, x / rms and its product with the weight, each once to bf16; the sum once to the type of
// y. GATED rounds gate and up to bf16 and then their product; RESIDUAL rounds the sum to bf16, adds, rounds: what the
// separate kernels do.
//
//   -DOUT_F32=1     y is float
//   -DNORM=1        x is normalised by its root mean square and multiplied by norm [K] first
//   -DGATED=1       N = 2 I, y [M, I] = silu(first half) * second half
//   -DRESIDUAL=1    y += instead of y =
//   -DTILES=1..8    strips per block
// Block: a multiple of WAVE, at most 256. Grid: x = blocks over N. K a multiple of 8, rows of x and W on 16 bytes.
// Dynamic shared memory: M * (K rounded up to 128, + 32) * 2 + waves * TILES * STRIP_ROWS * M * 4 bytes.
//
// Roofline: N K 2 bytes over memory bandwidth; see KERNELS.md for measured numbers.
#include "dev.h"
#include "dev/strip.h"

#ifndef TILES
#  define TILES 2
#endif
#ifndef GATED
#  define GATED 0
#endif
#if OUT_F32
typedef float OUT;
#else
typedef bf16 OUT;
#endif

enum : u32 {
    CHUNK = 128,          // k of one wave and turn: 256 bytes of a row
    PIECES = CHUNK / 32,  // 16-byte loads of a lane per strip and chunk
    DEPTH = 3,            // strips in flight
    // Outputs of a strip: gate and up rows of the same outputs meet in one strip.
    WIDTH = STRIP_ROWS / (GATED ? 2 : 1)
};

struct Weights {
    const bf16* w;
    u32 first, n, k;  // first output of the block; rows and columns of W
};

// Row of W that this lane reads for a strip. Rows behind the last one repeat it; nothing is stored for them.
DEV u64 weight_row(const Weights& w, u32 tile) {
    const u32 r = strip_w_row(), out = w.first + tile * WIDTH + r % WIDTH, outputs = GATED ? w.n / 2 : w.n;
    return (out < outputs ? out : outputs - 1) + (r < WIDTH ? 0 : outputs);
}

struct Strip { bf16x8 v[PIECES]; };

DEV Strip load_strip(const Weights& w, u32 tile, u32 chunk) {
    const bf16* p = w.w + weight_row(w, tile) * w.k;
    Strip s;
    UNROLL for (u32 i = 0; i < PIECES; ++i) {
        const u32 k = chunk * CHUNK + i * 32 + strip_k();
        s.v[i] = k < w.k ? load_stream((const bf16x8*)(p + k)) : zero8();
    }
    return s;
}

// The wave's strips in order: chunks of one strip of rows, then the next.
struct Cursor { u32 tile, chunk; };
DEV void advance(Cursor& at, u32 waves, u32 chunks) {
    at.chunk += waves;
    if (at.chunk < chunks) return;
    at.chunk = wave();
    ++at.tile;
}

// Rows of x in shared memory, zero up to a multiple of CHUNK; 32 spare values keep rows out of each other's banks.
DEV u32 x_stride(u32 k) { return (k + CHUNK - 1) / CHUNK * CHUNK + 32; }

#if !NORM
DEV void stage_rows(bf16* xs, const bf16* x, u32 m, u32 k, u32 stride) {
    const u32 pieces = (x_stride(k) - 32) / 8;
    for (u32 i = tid(); i < m * pieces; i += bdim()) {
        const u32 row = i / pieces, at = i % pieces * 8;
        *(bf16x8*)(xs + row * x_stride(k) + at) = at < k ? *(const bf16x8*)(x + (u64)row * stride + at) : zero8();
    }
}
#else
// One wave per row, whatever M is: the sum of squares has one order.
DEV void stage_normed(bf16* xs, const bf16* x, const bf16* norm, u32 m, u32 k, u32 stride, float eps) {
    const u32 padded = x_stride(k) - 32;
    for (u32 row = wave(); row < m; row += bdim() / WAVE) {
        const bf16* from = x + (u64)row * stride;
        bf16* to = xs + row * x_stride(k);
        float squares = 0.f;
        for (u32 at = lane() * 8; at < k; at += WAVE * 8) {
            const f32x8 v = load8(from + at);
            for (u32 i = 0; i < 8; ++i) squares = fma_(v.v[i], v.v[i], squares);
        }
        const float scale = rsqrt_(wave_sum(squares) / (float)k + eps);
        for (u32 at = lane() * 8; at < padded; at += WAVE * 8) {
            if (at >= k) {
                *(bf16x8*)(to + at) = zero8();
                continue;
            }
            f32x8 v = load8(from + at);
            const f32x8 w = load8(norm + at);
            for (u32 i = 0; i < 8; ++i) v.v[i] = w.v[i] * f32(to_bf16(v.v[i] * scale));
            store8(to + at, v);
        }
    }
}
#endif

DEV void multiply(f32x4& c, const Strip& w, const bf16* xs, u32 m, u32 stride, u32 chunk) {
    UNROLL for (u32 i = 0; i < PIECES; ++i) {
        StripX x;
        UNROLL for (u32 j = 0; j < STRIP_X; ++j) {
            const u32 row = strip_x_row(j), k = chunk * CHUNK + i * 32 + strip_k();
            x.v[j] = row < m ? *(const bf16x8*)(xs + row * stride + k) : zero8();
        }
        strip_mma(c, x, w.v[i]);
    }
}

// The wave's sums of a strip, and a fresh start.
DEV void put_sums(f32x4& c, float* sums, u32 m, u32 tile) {
    UNROLL for (u32 e = 0; e < 4; ++e) {
        const u32 row = strip_c_x(e);
        if (row < m) sums[((wave() * TILES + tile) * m + row) * STRIP_ROWS + strip_c_w(e)] = c.v[e];
        c.v[e] = 0.f;
    }
}

// Adds the waves' sums of output `out` (0..TILES * STRIP_ROWS) of row `m`.
DEV float gather(const float* sums, u32 waves, u32 m_count, u32 tile, u32 m, u32 r) {
    const u32 at = (tile * m_count + m) * STRIP_ROWS + r, per_wave = TILES * m_count * STRIP_ROWS;
    float s = sums[at];
    for (u32 w = 1; w < waves; ++w) s += sums[w * per_wave + at];
    return s;
}

DEV void store_outputs(OUT* y, const float* sums, const float* bias, u32 waves, u32 first, u32 m, u32 n,
                       u32 y_stride) {
    const u32 outputs = GATED ? n / 2 : n;
    for (u32 i = tid(); i < TILES * WIDTH * m; i += bdim()) {
        const u32 r = i % WIDTH, row = i / WIDTH % m, tile = i / WIDTH / m, out = first + tile * WIDTH + r;
        if (out >= outputs) continue;
        float s = gather(sums, waves, m, tile, row, r);
        if (bias) s += bias[out];
        OUT* dst = y + (u64)row * y_stride + out;
#if GATED
        float up = gather(sums, waves, m, tile, row, r + WIDTH);
        if (bias) up += bias[n / 2 + out];
        const float gate = f32(to_bf16(s));
        s = gate * rcp_(1.f + exp2_(-1.44269504f * gate)) * f32(to_bf16(up));
#endif
#if RESIDUAL
        s = f32(*dst) + f32(to<OUT>(s));
#endif
        *dst = to<OUT>(s);
    }
}

KERNEL(256) skinny(OUT* y, const bf16* x, const bf16* w, const float* bias, const bf16* norm, u32 m, u32 n, u32 k,
                   u32 y_stride, u32 x_stride_, float eps) {
    DYN_SHARED(bf16, xs);
    const u32 waves = bdim() / WAVE, stride = x_stride(k), chunks = (k + CHUNK - 1) / CHUNK;
    float* sums = (float*)(xs + m * stride);
    const Weights weights{w, bid_x() * TILES * WIDTH, n, k};
    const u32 mine = wave() < chunks ? (chunks - wave() + waves - 1) / waves : 0, items = mine * TILES;

    Cursor to_load{0, wave()}, at{0, wave()};
    Strip ring[DEPTH];
    UNROLL for (u32 d = 0; d < DEPTH; ++d) {
        if (d < items) ring[d] = load_strip(weights, to_load.tile, to_load.chunk);
        advance(to_load, waves, chunks);
    }
    grid_release();
    grid_wait();
#if NORM
    stage_normed(xs, x, norm, m, k, x_stride_, eps);
#else
    stage_rows(xs, x, m, k, x_stride_);
#endif
    sync();

    f32x4 c{{0.f, 0.f, 0.f, 0.f}};
    for (u32 i = 0; i < items; i += DEPTH) {
        UNROLL for (u32 d = 0; d < DEPTH; ++d) {
            if (i + d < items) {
                multiply(c, ring[d], xs, m, stride, at.chunk);
                const u32 tile = at.tile;
                advance(at, waves, chunks);
                if (at.tile != tile) put_sums(c, sums, m, tile);
                if (i + d + DEPTH < items) ring[d] = load_strip(weights, to_load.tile, to_load.chunk);
                advance(to_load, waves, chunks);
            }
        }
    }
    sync();
    const u32 busy = chunks < waves ? chunks : waves;
    store_outputs(y, sums, bias, busy, weights.first, m, n, y_stride);
}
EXPORT(skinny)
