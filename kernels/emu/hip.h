// hip.h - internals of the emulated device that implements the HIP driver ABI, shared by its source files.
//
// Work is queued per stream. In eager mode (the default) it runs at once. In lazy mode (HIPEMU_LAZY) it runs
// only when a caller waits for it, so that a caller that reads results without waiting gets wrong results.
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

// Result codes, common to HIP and CUDA.
enum ResultCode : int {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONFIGURATION = 9, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    ILLEGAL_ADDRESS = 700, PEER_ACCESS_ALREADY_ENABLED = 704, LAUNCH_FAILURE = 719,
    NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904, CAPTURE_ISOLATION = 905, CAPTURE_WRONG_THREAD = 908,
};

typedef std::function<void()> Work;

// A captured or instantiated graph: its work in order of submission.
struct Graph { std::vector<Work> work; };

struct Stream;

// An active stream capture: work submitted to a capturing stream is added to `graph` instead of executed.
struct StreamCapture {
    Graph* graph;
    Stream* origin;
    std::thread::id thread;
    int mode;                   // 0 global, 1 thread-local, 2 relaxed
    bool invalid = false;
    std::set<Stream*> joined;   // streams other than the origin
    std::set<Stream*> unjoined; // streams with work that the origin has not waited for
};

// A stream: its submitted work that has not run yet, and the capture to which the stream belongs (null:
// none).
struct Stream {
    std::deque<Work> queue;
    StreamCapture* capture = nullptr;
};

// One recording of an event in a stream. It is complete when all work before it in the stream's queue has
// run.
struct EventRecord {
    Stream* stream;
    bool completed = false;
    double time_ms = 0;
};
// An event, with its latest recording.
struct Event {
    unsigned flags;
    std::shared_ptr<EventRecord> record;  // null: never recorded
    StreamCapture* capture = nullptr;     // in which the event was recorded; null: none
};

// Size of a device allocation in bytes, and the file that backs the allocation.
struct Memory { size_t bytes; int file = -1; };  // `file`: its descriptor if other processes can open it

// An emulated device: its streams, captures and allocations.
struct Device {
    int ordinal;                            // index among the visible devices
    std::recursive_mutex lock;
    Stream default_stream;
    std::set<Stream*> streams;
    std::set<StreamCapture*> captures;
    std::map<uintptr_t, Memory> memory;     // device allocations by address
    std::map<uintptr_t, size_t> pinned;     // host allocations by address
    std::set<int> peers;                    // ordinals of the devices whose memory this device may access
    bool has_foreign_memory = false;        // memory of other processes has been opened
    size_t bytes_used = 0;
    int failure_code = OK;                  // result code of all calls after a failed launch
};
// The visible devices. If no device is visible, the list has one device that holds the state of failing
// calls.
const std::vector<Device*>& devices();
// The current device of the calling thread: the first one until the thread selects another.
Device& device();
// Maximum shared memory per block in bytes, for a kernel with `wave` lanes per wave.
int shared_limit(u32 wave);
typedef std::lock_guard<std::recursive_mutex> Guard;

// Bytes that fills (hipMemset*) have written in this process, for tests of cache sweeps between timings: those since the
// last call of hipEventElapsedTime, the fewest between two such calls, and the number of calls.
struct TimedFills {
    std::mutex lock;
    u64 bytes = 0, fewest_bytes = ~0ull, timings = 0;
    void add(u64 filled);
    void note_timing();
};
TimedFills& timed_fills();

// Queues work on a stream (null: the default stream). If the stream is being captured, records the work
// instead.
int put(Stream* s, Work work);
// Runs the stream's queued work, up to and including `until` if given.
void drain(Stream* s, const EventRecord* until = nullptr);
void drain_all();
// Must be called by every HIP call that is not allowed during stream capture. If active captures forbid the
// call from this thread, invalidates these captures and returns CAPTURE_UNSUPPORTED, as on hardware;
// otherwise returns OK.
int reject_while_capturing();
// Whether device memory [p, p + bytes) is within one allocation.
bool is_device(const void* p, size_t bytes);
bool is_pinned(const void* p, size_t bytes);
// The device that allocated the memory at `p`; null: `p` is not device memory of this process.
const Device* owner_of(const void* p);
// The allocations of the devices whose memory `d` may access, with their sizes.
std::map<uintptr_t, size_t> memory_of_peers(const Device& d);

}  // namespace emu
