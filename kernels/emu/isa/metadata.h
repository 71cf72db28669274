// metadata.h - MessagePack decoder, limited to what the metadata of code objects uses.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "number.h"

namespace emu::isa {

// A decoded MessagePack value: text, integer, map or list.
struct MetadataValue {
    std::string text;
    u64 integer = 0;
    std::vector<std::pair<MetadataValue, MetadataValue>> map;
    std::vector<MetadataValue> list;

    const MetadataValue* find(const char* key) const {
        for (const auto& [name, value] : map)
            if (name.text == key) return &value;
        return nullptr;
    }
    u64 number(const char* key) const {
        const MetadataValue* value = find(key);
        return value ? value->integer : 0;
    }
    std::string text_of(const char* key) const {
        const MetadataValue* value = find(key);
        return value ? value->text : std::string();
    }
};

MetadataValue unpack(const u8* bytes, size_t size);

}  // namespace emu::isa
