// hip.h - the emulated device behind the HIP driver ABI: what its source files share.
//
// Work goes into queues, one per stream. Eagerly (the default) a queue is run at once; lazily (HIPEMU_LAZY) it is run
// when somebody waits for it, which shows who reads results without waiting.
#pragma once
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "lane.h"

#define HIP extern "C" __attribute__((visibility("default")))

namespace emu {

// Result codes, those of HIP and CUDA.
enum Code : int {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONFIGURATION = 9, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    PEER_ACCESS_ALREADY_ENABLED = 704, LAUNCH_FAILURE = 719,
    NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904, CAPTURE_ISOLATION = 905, CAPTURE_WRONG_THREAD = 908,
};

typedef std::function<void()> Work;

struct Graph { std::vector<Work> work; };

struct Stream;

// A capture under way: what is put into its streams is recorded instead of run.
struct Capture {
    Graph* graph;
    Stream* origin;
    std::thread::id thread;
    int mode;                   // 0 global, 1 thread-local, 2 relaxed
    bool invalid = false;
    std::set<Stream*> joined;   // streams besides the origin
    std::set<Stream*> loose;    // those with work the origin has not waited for
};

struct Stream {
    std::deque<Work> queue;
    Capture* capture = nullptr;
};

// One recording of an event: passes when the queue gets to it.
struct Mark {
    Stream* stream;
    bool passed = false;
    double time_ms = 0;
};
struct Event {
    unsigned flags;
    std::shared_ptr<Mark> mark;     // null: never recorded
    Capture* capture = nullptr;     // recorded into a capture
};

struct Memory { size_t bytes; int file = -1; };  // `file`: that of memory which other processes can open

struct Device {
    std::recursive_mutex lock;
    std::set<Stream*> streams;
    std::set<Capture*> captures;
    std::map<uintptr_t, Memory> memory;     // device allocations by address
    std::map<uintptr_t, size_t> pinned;     // host allocations by address
    std::set<void*> peers;                  // contexts of other devices that this one reaches
    size_t bytes_used = 0;
    int lost = OK;                          // after a launch failed every call answers this
};
Device& device();
// Most shared memory of a block whose waves have so many lanes, bytes.
int shared_limit(u32 wave);
typedef std::lock_guard<std::recursive_mutex> Guard;

// Puts work into a stream (null: the default one), or into its capture.
int put(Stream* s, Work work);
// Runs what the stream holds, up to and including `until` if given.
void drain(Stream* s, const Mark* until = nullptr);
void drain_all();
// The answer to a call that may not happen while the calling thread captures; spoils the capture, as on hardware.
int refuse_while_capturing();
// Whether device memory [p, p + bytes) lies in one allocation.
bool is_device(const void* p, size_t bytes);
bool is_pinned(const void* p, size_t bytes);

}  // namespace emu
