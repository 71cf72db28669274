// metadata.cpp - reads MessagePack.
#include "metadata.h"

#include "instruction.h"

namespace emu::isa {

namespace {

struct MessagePackReader {
    const u8 *at, *end;
    u32 depth = 0;

    u8 byte() {
        if (at == end) fault("truncated metadata");
        return *at++;
    }
    u64 big_endian(u32 bytes) {
        u64 value = 0;
        while (bytes--) value = value << 8 | byte();
        return value;
    }
    MetadataValue text(u64 bytes) {
        if (bytes > (u64)(end - at)) fault("truncated metadata");
        MetadataValue v;
        v.text.assign((const char*)at, bytes);
        at += bytes;
        return v;
    }
    MetadataValue map(u64 count) {
        MetadataValue v;
        while (count--) {
            MetadataValue key = value();
            v.map.emplace_back(std::move(key), value());
        }
        return v;
    }
    MetadataValue list(u64 count) {
        MetadataValue v;
        while (count--) v.list.push_back(value());
        return v;
    }
    MetadataValue integer(u64 number) {
        MetadataValue v;
        v.integer = number;
        return v;
    }
    MetadataValue value() {
        if (++depth > 32) fault("metadata is nested too deeply");
        const MetadataValue v = read();
        --depth;
        return v;
    }
    MetadataValue read() {
        const u8 type = byte();
        if (type < 0x80) return integer(type);
        if (type < 0x90) return map(type & 15);
        if (type < 0xa0) return list(type & 15);
        if (type < 0xc0) return text(type & 31);
        if (type >= 0xe0) return integer((u64)(i64)(signed char)type);
        switch (type) {
            case 0xc0: return integer(0);
            case 0xc2: case 0xc3: return integer(type & 1);
            case 0xcc: case 0xcd: case 0xce: case 0xcf: return integer(big_endian(1u << (type - 0xcc)));
            case 0xd0: case 0xd1: case 0xd2: case 0xd3: return integer(big_endian(1u << (type - 0xd0)));
            case 0xd9: return text(big_endian(1));
            case 0xda: return text(big_endian(2));
            case 0xdc: return list(big_endian(2));
            case 0xde: return map(big_endian(2));
            default: fault("unknown type in metadata");
        }
    }
};

}  // namespace

MetadataValue unpack(const u8* bytes, size_t size) { return MessagePackReader{bytes, bytes + size}.value(); }

}  // namespace emu::isa
