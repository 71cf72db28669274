#include "settings.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <thread>

namespace emu {

static u64 number(const char* name, u64 otherwise) {
    const char* text = getenv(name);
    if (!text || !*text) return otherwise;
    char* end;
    u64 value = strtoull(text, &end, 0);
    if (*end == 'K') value <<= 10;
    if (*end == 'M') value <<= 20;
    if (*end == 'G') value <<= 30;
    return value;
}

static const char* text(const char* name, const char* otherwise) {
    const char* value = getenv(name);
    return value && *value ? value : otherwise;
}

static std::string unique_id(int device) {
    char text[32];
    snprintf(text, sizeof text, "GPU-%016X", device + 1);
    return text;
}

// Returns the device in `from` that `word` identifies by its index or by its unique id; -1: none.
static int named_device(std::string word, const std::vector<int>& from) {
    for (size_t i = 0; i < from.size(); ++i)
        if (word == std::to_string(i) || word == unique_id(from[i])) return from[i];
    return -1;
}

// Returns the devices of `from` that `list` (ROCR_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES) makes visible, in
// the order of the list. As in AMD's runtimes, an unknown word ends the list; a repeated device ends a ROCR
// list, and is ignored in a HIP list.
static std::vector<int> visible(const char* list, const std::vector<int>& from, bool is_rocr) {
    std::vector<int> found;
    std::stringstream words(list);
    for (std::string word; std::getline(words, word, ',');) {
        if (is_rocr) {
            word.erase(std::remove_if(word.begin(), word.end(), isspace), word.end());
            std::transform(word.begin(), word.end(), word.begin(), toupper);
        }
        const int device = named_device(word, from);
        const bool is_known = std::count(found.begin(), found.end(), device) > 0;
        if (device < 0 || (is_known && is_rocr)) break;
        if (!is_known) found.push_back(device);
    }
    return found;
}

static std::vector<int> visible_devices(u32 count) {
    std::vector<int> devices;
    for (u32 i = 0; i < count; ++i) devices.push_back((int)i);
    if (const char* rocr = getenv("ROCR_VISIBLE_DEVICES")) devices = visible(rocr, devices, true);
    const char* hip = text("HIP_VISIBLE_DEVICES", text("CUDA_VISIBLE_DEVICES", nullptr));
    return hip ? visible(hip, devices, false) : devices;
}

// The L2 size of each card is 4 MB, as HIP reports: the L2 of one XCD.
static const EmulatedCard CARDS[] = {
    {"MI300X", "AMD Instinct MI300X", 0x942, 304, 192ull << 30, false},
    {"MI300A", "AMD Instinct MI300A", 0x942, 228, 128ull << 30, true},
    {"MI325X", "AMD Instinct MI325X", 0x942, 304, 256ull << 30, false},
    {"MI350X", "AMD Instinct MI350X", 0x950, 256, 288ull << 30, false},
    {"MI355X", "AMD Instinct MI355X", 0x950, 256, 288ull << 30, false},
};

static const EmulatedCard* card_named(const char* name) {
    for (const EmulatedCard& card : CARDS)
        if (name && !strcmp(card.name, name)) return &card;
    if (name) fprintf(stderr, "hipemu: HIPEMU_CARD=%s is no known card\n", name);
    return nullptr;
}

static DeviceLink link_named(const std::string& name) {
    if (name == "xgmi") return DeviceLink::XGMI;
    if (name == "pcie") return DeviceLink::PCIE;
    if (name != "none") fprintf(stderr, "hipemu: HIPEMU_LINK=%s is neither xgmi, pcie nor none\n", name.c_str());
    return DeviceLink::NONE;
}

static EmulatorSettings read() {
    EmulatorSettings s;
    s.card = card_named(text("HIPEMU_CARD", nullptr));
    s.seed = number("HIPEMU_SEED", 0);
    s.threads = (u32)number("HIPEMU_THREADS", std::max(1u, std::thread::hardware_concurrency()));
    s.progress_timeout_ms = number("HIPEMU_PROGRESS_TIMEOUT_MS", 10000);
    s.wave = (u32)number("HIPEMU_WAVE", 64);
    const char* gfx = text("HIPEMU_GFX", nullptr);
    s.gfx = gfx ? (u32)strtoul(gfx, nullptr, 16) : s.card ? s.card->gfx : 0;
    const char* isa = text("HIPEMU_ISA", "");
    s.isa = !strcmp(isa, "gfx942") ? 0x942 : !strcmp(isa, "gfx950") ? 0x950 : 0;
    if (*isa && !s.isa) fprintf(stderr, "hipemu: HIPEMU_ISA=%s is neither gfx942 nor gfx950\n", isa), abort();
    if (s.isa && s.card) s.isa = s.card->gfx;
    if (s.isa) s.gfx = s.isa, s.wave = 64;
    s.clang = text("HIPEMU_CLANG", "clang-22");
    s.counters = text("HIPEMU_COUNTERS", nullptr);
    s.devices = visible_devices((u32)number("HIPEMU_DEVICES", 8));
    s.peer_access = number("HIPEMU_PEER_ACCESS", 1) != 0;
    s.link = link_named(text("HIPEMU_LINK", "xgmi"));
    s.memory_bytes = number("HIPEMU_MEMORY", s.card ? s.card->memory_bytes : 1ull << 30);
    s.graph_bytes = number("HIPEMU_GRAPH_BYTES", 0);
    s.lazy = (int)number("HIPEMU_LAZY", 0);
    s.sanitize = text("HIPEMU_SANITIZE", nullptr);
    s.compiler = text("HIPEMU_CXX", "c++");
    s.keep = number("HIPEMU_KEEP", 0) != 0;
    return s;
}

static EmulatorSettings the_settings = read();
EmulatorSettings& settings() { return the_settings; }

}  // namespace emu
