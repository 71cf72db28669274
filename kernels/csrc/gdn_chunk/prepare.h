// gdn_chunk/prepare.h - what a chunk and value head need before the state of the row is known: decays, scores, and the inverse
// of the unit triangular matrix of the chunk, in f32.
#pragma once
#include "gdn_chunk/chunk.h"
#include "gdn/gates.h"
#include "dev/register_copy.h"

enum : u32 {
    PREPARE_WARPS = 4,
    PREPARE_THREADS = PREPARE_WARPS * WARP_SIZE,
    OWN_PAIRS = 2 * PAIRS / PREPARE_WARPS,  // tiles of K K^T and Q K^T of a warp
    M_STRIDE = CHUNK + 4,                   // row stride of f32 matrices in shared memory
    HALF_CHUNK = CHUNK / 2
};
static_assert(OWN_PAIRS * PREPARE_WARPS == 2 * PAIRS, "warps have different numbers of tiles");

// Shared memory: keys and queries, later the matrix A and its inverse.
union alignas(16) PrepareTile {
    half_t rows[CHUNK * K_STRIDE];
    float matrix[CHUNK * M_STRIDE];
};
struct TokenFactors {
    float log_decay[CHUNK];  // sum of the logarithms to base 2, up to and with the token
    float beta[CHUNK], k_scale[CHUNK], q_scale[CHUNK];
};
struct PrepareShared {
    PrepareTile k, q;
    TokenFactors tokens;
};

// Copies the queries or keys of a head; those after the last token of the row are zeros.
DEV void copy_rows(half_t* to, const half_t* from, u32 stride, u32 tokens) {
#if WARP_SIZE == 64
    enum : u32 { OWN = CHUNK * KEY_PIECES / PREPARE_THREADS };
    u32x4 pieces[OWN];
    UNROLL for (u32 n = 0; n < OWN; ++n) {
        const u32 i = n * PREPARE_THREADS + tid(), token = i / KEY_PIECES;
        pieces[n] = load_piece(from + (u64)(token < tokens ? token : 0) * stride + i % KEY_PIECES * 8);
    }
    UNROLL for (u32 n = 0; n < OWN; ++n) {
        const u32 i = n * PREPARE_THREADS + tid(), token = i / KEY_PIECES;
        store_loaded(to + token * K_STRIDE + i % KEY_PIECES * 8, pieces[n], token < tokens);
    }
#else
    for (u32 i = tid(); i < CHUNK * KEY_PIECES; i += PREPARE_THREADS) {
        const u32 token = i / KEY_PIECES, at = i % KEY_PIECES * 8;
        const bool present = token < tokens;
        cp_async16_zfill(to + token * K_STRIDE + at, from + (u64)(present ? token : 0) * stride + at, present);
    }
#endif
}

// Computes the gates of the tokens by one warp. Tokens after the last one of the row neither decay nor write.
DEV void token_gates(TokenFactors& out, const half_t* beta, const half_t* decay, u32 beta_stride, u32 decay_stride, float rate,
                     float bias, u32 tokens) {
    enum : u32 { OWN = CHUNK / WARP_SIZE };
    float sums[OWN], sum = 0.f;
    UNROLL for (u32 n = 0; n < OWN; ++n) {
        const u32 t = lane() * OWN + n;
        // 2^-150 is 0 in f32; the limit keeps the sums finite.
        if (t < tokens) sum += fmax_(log2_decay(rate, f32(decay[(u64)t * decay_stride]) + bias), -150.f);
        sums[n] = sum;
        out.beta[t] = t < tokens ? sigmoid(f32(beta[(u64)t * beta_stride])) : 0.f;
    }
    float before = sum;
    for (u32 step = 1; step < WARP_SIZE; step *= 2) {
        const float other = shfl(before, lane() - step);
        if (lane() >= step) before += other;
    }
    UNROLL for (u32 n = 0; n < OWN; ++n) out.log_decay[lane() * OWN + n] = before - sum + sums[n];
}

// Computes the reciprocals of the norms of queries and keys, a thread per row.
DEV void token_norms(PrepareShared& s) {
    for (u32 i = tid(); i < 2 * CHUNK; i += bdim()) {
        const u32 token = i % CHUNK;
        const half_t* row = (i < CHUNK ? s.k : s.q).rows + token * K_STRIDE;
        float sums[2] = {0.f, 0.f};  // of even and of odd channels
        UNROLL for (u32 c = 0; c < KEY_DIM; c += 8) {
            const f32x8 x = load8(row + c);
            UNROLL for (u32 e = 0; e < 8; ++e) sums[e % 2] = fma_(x.v[e], x.v[e], sums[e % 2]);
        }
        const float scale = rsqrt_(sums[0] + sums[1] + 1e-6f);
        if (i < CHUNK) s.tokens.k_scale[token] = scale;
        else s.tokens.q_scale[token] = scale * rsqrt_((float)KEY_DIM);
    }
}

// The products of a warp: five tiles on and below the diagonal of K K^T (even warps) or of Q K^T (odd warps), in two rows of
// tiles: rows 3 and 0, or rows 2 and 1.
struct WarpPairs {
    bool of_queries, of_last_row;
    u32 first_row, second_row;
};
DEV WarpPairs warp_pairs() {
    const bool last = warp_id() < 2;
    return {warp_id() % 2 == 1, last, last ? 3u : 2u, last ? 0u : 1u};
}
// Row and column of tile n of a warp.
DEV u32 pair_row(const WarpPairs& pairs, u32 n) { return n < 3 || (n == 4 && pairs.of_last_row) ? pairs.first_row : pairs.second_row; }
DEV u32 pair_column(const WarpPairs& pairs, u32 n) { return n < 3 ? n : n == 3 ? 0 : pairs.of_last_row ? 3 : 1; }

struct PairSums { FragC v[OWN_PAIRS]; };
DEV PairSums pair_products(const PrepareShared& s, const WarpPairs& pairs) {
    const half_t* rows = (pairs.of_queries ? s.q : s.k).rows;
    PairSums sums;
    UNROLL for (u32 n = 0; n < OWN_PAIRS; ++n) sums.v[n] = zero_c();
    UNROLL for (u32 c = 0; c < KEY_DIM; c += 16) {
        const LeftOperand first = load_left(rows + pairs.first_row * 16 * K_STRIDE + c, K_STRIDE);
        const LeftOperand second = load_left(rows + pairs.second_row * 16 * K_STRIDE + c, K_STRIDE);
        RightOperand keys[3];
        UNROLL for (u32 j = 0; j < 3; ++j) {
            keys[j] = load_right(s.k.rows + j * 16 * K_STRIDE + c, K_STRIDE);
            multiply_tiles(sums.v[j], first, keys[j]);
        }
        multiply_tiles(sums.v[3], second, keys[0]);
        if (pairs.of_last_row) multiply_tiles(sums.v[4], first, load_right(s.k.rows + 48 * K_STRIDE + c, K_STRIDE));
        else multiply_tiles(sums.v[4], second, keys[1]);
    }
    return sums;
}

// Stores tile n of a warp: of Q K^T in the record, of A in shared memory over the keys.
DEV void store_pair(PrepareShared& s, ChunkRecord& record, const WarpPairs& pairs, u32 n, const FragC& sum) {
    const TokenFactors& f = s.tokens;
    const u32 row = pair_row(pairs, n), column = pair_column(pairs, n);
    FragC tile;
    UNROLL for (u32 e = 0; e < FragLayout::NC; ++e) {
        const u32 i = row * 16 + FragLayout::a_row(e), j = column * 16 + FragLayout::a_k(e);
        const float scale = exp2_(fmin_(f.log_decay[i] - f.log_decay[j], 0.f)) * f.k_scale[j] * sum.x[e];
        tile.x[e] = pairs.of_queries ? scale * f.q_scale[i] : scale * f.k_scale[i] * f.beta[i];
        if (j > i || (j == i && !pairs.of_queries)) tile.x[e] = 0.f;
    }
    if (pairs.of_queries) {
        record.output.scores[pair_index(row, column)][lane()] = rounded<FragA>(tile);
        return;
    }
    UNROLL for (u32 e = 0; e < FragLayout::NC; ++e)
        s.k.matrix[(row * 16 + FragLayout::a_row(e)) * M_STRIDE + column * 16 + FragLayout::a_k(e)] = tile.x[e];
}

// Inverts both diagonal blocks of HALF_CHUNK tokens of I + A by forward substitution, a column per thread.
DEV void invert_diagonal(float* inverse, const float* a) {
    if (tid() >= CHUNK) return;
    const u32 base = tid() / HALF_CHUNK * HALF_CHUNK, column = tid() % HALF_CHUNK;
    const float* block = a + base * M_STRIDE + base;
    float x[HALF_CHUNK];
    UNROLL for (u32 r = 0; r < HALF_CHUNK; ++r) x[r] = r == column ? 1.f : 0.f;
    UNROLL for (u32 r = 1; r < HALF_CHUNK; ++r) {
        UNROLL for (u32 k = 0; k < r; k += 4) {
            const f32x4 row = *(const f32x4*)(block + r * M_STRIDE + k);
            UNROLL for (u32 e = 0; e < 4; ++e)
                if (k + e < r) x[r] = fma_(-row.v[e], x[k + e], x[r]);
        }
    }
    UNROLL for (u32 r = 0; r < HALF_CHUNK; ++r) inverse[(base + r) * M_STRIDE + base + column] = x[r];
}

// c = sign * a * b of [HALF_CHUNK, HALF_CHUNK] matrices in f32. Every thread of the block computes several rows of two columns.
DEV void multiply_blocks(float* c, const float* a, const float* b, float sign) {
    enum : u32 { OWN = HALF_CHUNK * HALF_CHUNK / 2 / PREPARE_THREADS };
    const u32 column = tid() % (HALF_CHUNK / 2) * 2, first = tid() / (HALF_CHUNK / 2) * OWN;
    f32x2 sum[OWN];
    UNROLL for (u32 r = 0; r < OWN; ++r) sum[r] = {{0.f, 0.f}};
    _Pragma("unroll 4") for (u32 k = 0; k < HALF_CHUNK; k += 4) {
        f32x2 x[4];
        UNROLL for (u32 e = 0; e < 4; ++e) x[e] = *(const f32x2*)(b + (k + e) * M_STRIDE + column);
        UNROLL for (u32 r = 0; r < OWN; ++r) {
            const f32x4 row = *(const f32x4*)(a + (first + r) * M_STRIDE + k);
            UNROLL for (u32 e = 0; e < 4; ++e)
                UNROLL for (u32 n = 0; n < 2; ++n) sum[r].v[n] = fma_(row.v[e], x[e].v[n], sum[r].v[n]);
        }
    }
    UNROLL for (u32 r = 0; r < OWN; ++r)
        *(f32x2*)(c + (first + r) * M_STRIDE + column) = {{sign * sum[r].v[0], sign * sum[r].v[1]}};
}

// Inverts I + A: the block below the diagonal is -D A' C, where C and D are the inverses of the diagonal blocks and A' the
// block of A. A' C is stored over the block of A above the diagonal, which is not used.
DEV void invert(float* inverse, float* a) {
    const u32 below = HALF_CHUNK * M_STRIDE, last = below + HALF_CHUNK;
    invert_diagonal(inverse, a);
    sync();
    multiply_blocks(a + HALF_CHUNK, a + below, inverse, 1.f);
    sync();
    multiply_blocks(inverse + below, inverse + last, a + HALF_CHUNK, -1.f);
    sync();
}

DEV void store_inverse(ChunkRecord& record, const PrepareShared& s) {
    for (u32 n = warp_id(); n < PAIRS; n += PREPARE_WARPS) {
        const u32 row = n < 1 ? 0 : n < 3 ? 1 : n < 6 ? 2 : 3, column = n - pair_index(row, 0);
        FragC tile;
        UNROLL for (u32 e = 0; e < FragLayout::NC; ++e) {
            const u32 i = row * 16 + tile_row(e), j = column * 16 + tile_column(e);
            tile.x[e] = s.q.matrix[i * M_STRIDE + j] * s.tokens.beta[j];
        }
        record.state.inverse[n][lane()] = rounded<TileOperand>(tile);
    }
}

DEV void store_factors(ChunkRecord& record, const TokenFactors& f) {
    if (tid() >= CHUNK) return;
    const u32 t = tid();
    const float last = f.log_decay[CHUNK - 1], until = exp2_(f.log_decay[t]);
    record.state.factors.read[t] = until * f.k_scale[t];
    record.state.factors.write[t] = exp2_(fmin_(last - f.log_decay[t], 0.f)) * f.k_scale[t];
    record.output.factors.read[t] = until * f.q_scale[t];
    if (t < 4) record.state.factors.total[t] = exp2_(last);
}
