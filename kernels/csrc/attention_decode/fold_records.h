// attention_decode/fold_records.h - merges the partial results (records) of the splits of a query into one. A
// record has the output channels of one split, its maximum score and its sum of probabilities. The including
// file (merge_records.h or mla_decode/records.h) defines D, RECORD, CHANNELS, SPREAD and AHEAD.
#pragma once

// Number of consecutive output channels that a lane loads at a time. A lane has CHANNELS output channels in
// all. Successive lanes load successive groups of PIECE channels, so that the loads of a warp are coalesced.
enum : u32 { PIECE = CHANNELS < 4 ? CHANNELS : 4 };
// Output channels that one lane has of the partial result of one split.
struct LanePartialOutput { float v[CHANNELS]; };
struct alignas(PIECE * 4) ChannelPiece { float v[PIECE]; };
DEV u32 folded_channel(u32 c) { return c / PIECE * PIECE * WARP_SIZE + lane() * PIECE + c % PIECE; }
DEV LanePartialOutput read_channels(const float* from) {
    LanePartialOutput r;
    UNROLL for (u32 c = 0; c < CHANNELS; c += PIECE) {
        const ChannelPiece piece = *(const ChannelPiece*)(from + folded_channel(c));
        UNROLL for (u32 i = 0; i < PIECE; ++i) r.v[c + i] = piece.v[i];
    }
    return r;
}
DEV void write_channels(float* to, const LanePartialOutput& from) {
    UNROLL for (u32 c = 0; c < CHANNELS; c += PIECE) {
        ChannelPiece piece;
        UNROLL for (u32 i = 0; i < PIECE; ++i) piece.v[i] = from.v[c + i];
        *(ChannelPiece*)(to + folded_channel(c)) = piece;
    }
}

// Merged partial results of several splits of one query: the output channels of this lane, the maximum score
// and the sum of probabilities.
struct FoldedRecord {
    LanePartialOutput value;
    float max, sum;
};

// Merges the partial results (records) of splits first, first + SPREAD, first + 2 SPREAD, .. below `count` of
// one query. The record of split i is at records + i * stride. Every lane of the warp must call it.
DEV FoldedRecord folded(const float* records, u32 first, u32 count, u32 stride) {
    LanePartialOutput value{};
    float max = NO_SCORE, sum = 0.f;
    for (u32 from = first; from < count; from += AHEAD * SPREAD) {
        LanePartialOutput part[AHEAD];
        f32x2 stats[AHEAD];
        UNROLL for (u32 i = 0; i < AHEAD; ++i) {
            const u32 at = from + i * SPREAD;
            const float* record = records + (at < count ? at : first) * stride;
            part[i] = read_channels(record);
            stats[i] = *(const f32x2*)(record + D);
            if (at >= count) stats[i] = f32x2{{NO_SCORE, 0.f}};
        }
        float new_max = max;
        UNROLL for (u32 i = 0; i < AHEAD; ++i) new_max = fmax_(new_max, stats[i].v[0]);
        const float rescale = exp2_(max - new_max);
        UNROLL for (u32 c = 0; c < CHANNELS; ++c) value.v[c] *= rescale;
        sum *= rescale;
        max = new_max;
        UNROLL for (u32 i = 0; i < AHEAD; ++i) {
            const float weight = exp2_(stats[i].v[0] - max);
            sum = fma_(weight, stats[i].v[1], sum);
            UNROLL for (u32 c = 0; c < CHANNELS; ++c) value.v[c] = fma_(weight, part[i].v[c], value.v[c]);
        }
    }
    return FoldedRecord{value, max, sum};
}
