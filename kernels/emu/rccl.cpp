// rccl.cpp - RCCL for emulated GPUs: all-reduce, all-gather, broadcast, send and receive. The ranks of a
// communicator are processes on one host (or copies of this library in one process) that communicate through
// shared memory.
//
// A collective is a sequence of rounds. In a round, each rank fills one of its two slots, waits for all other
// ranks, and reads all slots. Successive rounds alternate between the slots, so that no slot is overwritten
// while it is read. An aborted rank stops waiting and leaves its results unchanged, as on hardware. Sends and
// receives use a mailbox per pair of ranks, so that a rank without data to send or receive makes no call.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <vector>

#include "hip.h"

using namespace emu;

namespace {

// Result codes of RCCL.
enum RcclStatus : int { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
// Element types of RCCL.
enum RcclDataType : int { I32 = 2, I64 = 4, F16 = 6, F32 = 7, BF16 = 9 };

// Identifier of a communicator (ncclUniqueId).
struct UniqueId { u8 bytes[128]; };

const size_t SLOT_BYTES = 64 << 10;
const size_t MAILBOX_BYTES = 16 << 10;

// Shared memory that one rank writes: two data buffers (slots), which successive rounds use alternately.
struct RankSlots {
    alignas(64) std::atomic<u64> rounds;
    u8 slots[2][SLOT_BYTES];
};
// Shared memory of a communicator: number of ranks that have joined, and the slots of each rank.
struct CommMemory {
    alignas(64) std::atomic<int> joined;
    RankSlots ranks[1];
};

// Transfers data from one rank to another in chunks of at most MAILBOX_BYTES. `sent` and `taken` count
// chunks; the mailbox is full if `sent` > `taken`.
struct Mailbox {
    alignas(64) std::atomic<u64> sent;
    alignas(64) std::atomic<u64> taken;
    size_t bytes;
    u8 piece[MAILBOX_BYTES];
};

// A communicator, as one rank uses it (ncclComm_t).
struct Comm {
    int size, rank;
    CommMemory* memory;
    char path[64];
    u64 rounds = 0;
    std::atomic<bool> aborted{false};

    // In shared memory, the mailboxes follow the slots of all ranks.
    Mailbox& mailbox(int from, int to) const { return ((Mailbox*)(memory->ranks + size))[from * size + to]; }

    u8* slot(int of) const { return memory->ranks[of].slots[rounds % 2]; }

    // Runs one round: copies `bytes` bytes from `mine` to this rank's slot, and waits until all ranks have
    // filled their slots. Returns false if this rank was aborted.
    bool round(const void* mine, size_t bytes) {
        ++rounds;
        if (bytes) memcpy(slot(rank), mine, bytes);
        memory->ranks[rank].rounds.store(rounds, std::memory_order_release);
        for (int of = 0; of < size; ++of)
            while (memory->ranks[of].rounds.load(std::memory_order_acquire) < rounds) {
                if (aborted) return false;
                usleep(20);
            }
        return true;
    }
};

size_t bytes_of(int type) {
    switch (type) {
        case I32: case F32: return 4;
        case I64: return 8;
        case F16: case BF16: return 2;
        default: return 0;
    }
}

bool can_reduce(int type) { return type == F32 || type == BF16 || type == F16; }

float of_f16(u16 bits) {
    const int exponent = bits >> 10 & 31, digits = bits & 1023;
    float size = exponent ? ldexpf((float)(digits + 1024), exponent - 25) : ldexpf((float)digits, -24);
    if (exponent == 31) size = digits ? NAN : INFINITY;
    return bits >> 15 ? -size : size;
}

// f32 to f16, rounded to eleven significant bits, or fewer for subnormals; a rounding carry increments the
// exponent.
u16 to_f16(float x) {
    const u16 sign = std::signbit(x) ? 0x8000 : 0;
    const float size = fabsf(x);
    if (std::isnan(x)) return sign | 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    int exponent;
    frexpf(size, &exponent);
    if (exponent < -13 || size == 0) exponent = -13;
    const u16 digits = (u16)nearbyintf(ldexpf(size, 11 - exponent));
    return sign | (u16)(((exponent + 13) << 10) + digits);
}

float number(const u8* at, int type) {
    u32 bits = 0;
    if (type == F16) {
        u16 half;
        memcpy(&half, at, 2);
        return of_f16(half);
    }
    memcpy(type == F32 ? (u8*)&bits : (u8*)&bits + 2, at, bytes_of(type));
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// Stores `x` as element type `type`, rounded to nearest, ties to even.
void store(u8* at, int type, float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    if (type == F16) bits = to_f16(x);
    if (type == BF16) bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    memcpy(at, &bits, bytes_of(type));
}

// Splits `total` bytes into chunks of at most SLOT_BYTES and calls `each(offset, bytes)` for each chunk,
// until `each` returns false.
template <class F> void pieces(size_t total, F each) {
    for (size_t at = 0; at < total; at += SLOT_BYTES)
        if (!each(at, total - at < SLOT_BYTES ? total - at : SLOT_BYTES)) return;
}

// Writes the sums over all ranks to `to`, which may equal `from`. Values are added in rank order.
void sum(Comm* c, const u8* from, u8* to, size_t count, int type) {
    const size_t each = bytes_of(type);
    pieces(count * each, [&](size_t at, size_t bytes) {
        if (!c->round(from + at, bytes)) return false;
        for (size_t i = 0; i < bytes; i += each) {
            float x = 0;
            for (int rank = 0; rank < c->size; ++rank) x += number(c->slot(rank) + i, type);
            store(to + at + i, type, x);
        }
        return true;
    });
}

int put_work(Comm* c, Stream* s, Work work) {
    if (c->aborted) return INVALID_USAGE;
    Guard guard(device().lock);
    return put(s, std::move(work)) == OK ? SUCCESS : SYSTEM_ERROR;
}

// A send (`out`) or a receive between ncclGroupStart() and ncclGroupEnd().
struct PeerTransfer { bool out; u8* at; size_t bytes; int peer; size_t done; };
// The sends and receives of this thread since ncclGroupStart().
struct RcclGroupCall {
    bool open = false;
    Comm* comm = nullptr;
    Stream* stream = nullptr;
    std::vector<PeerTransfer> transfers;
};
thread_local RcclGroupCall group;

// Performs all transfers in chunks: a send when its mailbox is free, a receive when its mailbox is full.
// Transfers with the same direction and peer keep their order.
void exchange(Comm* c, std::vector<PeerTransfer> transfers) {
    size_t open = 0;
    for (const PeerTransfer& t : transfers) open += t.bytes > 0;
    while (open && !c->aborted) {
        bool progress = false;
        std::set<std::pair<bool, int>> directions;
        for (PeerTransfer& t : transfers) {
            if (t.done == t.bytes || !directions.insert({t.out, t.peer}).second) continue;
            Mailbox& mailbox = t.out ? c->mailbox(c->rank, t.peer) : c->mailbox(t.peer, c->rank);
            const u64 sent = mailbox.sent.load(std::memory_order_acquire);
            const u64 taken = mailbox.taken.load(std::memory_order_acquire);
            if (t.out != (sent == taken)) continue;
            const size_t bytes = std::min(t.bytes - t.done, MAILBOX_BYTES);
            if (t.out) {
                memcpy(mailbox.piece, t.at + t.done, bytes);
                mailbox.bytes = bytes;
                mailbox.sent.store(sent + 1, std::memory_order_release);
            } else {
                if (mailbox.bytes != bytes) {
                    fprintf(stderr, "rccl: rank %d sends %zu bytes, rank %d expects %zu\n", t.peer, mailbox.bytes, c->rank, bytes);
                    abort();
                }
                memcpy(t.at + t.done, mailbox.piece, bytes);
                mailbox.taken.store(taken + 1, std::memory_order_release);
            }
            t.done += bytes;
            open -= t.done == t.bytes;
            progress = true;
        }
        if (!progress) usleep(20);
    }
}

int transfer(bool out, void* at, size_t count, int type, int peer, Comm* c, Stream* s) {
    if (!group.open || peer < 0 || peer >= c->size) return INVALID_USAGE;
    group.comm = c;
    group.stream = s;
    group.transfers.push_back({out, (u8*)at, count * bytes_of(type), peer, 0});
    return SUCCESS;
}

}  // namespace

HIP int ncclGetVersion(int* version) { *version = 22800; return SUCCESS; }

HIP const char* ncclGetErrorString(int code) {
    switch (code) {
        case SUCCESS: return "no error";
        case SYSTEM_ERROR: return "unhandled system error";
        case INVALID_ARGUMENT: return "invalid argument";
        case INVALID_USAGE: return "invalid usage";
        case IN_PROGRESS: return "in progress";
        default: return "unknown result code";
    }
}
HIP const char* ncclGetLastError(Comm*) { return ""; }

HIP int ncclGetUniqueId(UniqueId* id) {
    const int random = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (random < 0) return SYSTEM_ERROR;
    const bool whole = read(random, id, sizeof *id) == (ssize_t)sizeof *id;
    close(random);
    return whole ? SUCCESS : SYSTEM_ERROR;
}

HIP int ncclCommInitRankConfig(Comm** out, int size, UniqueId id, int rank, const void*) {
    if (size < 1 || rank < 0 || rank >= size) return INVALID_ARGUMENT;
    auto* c = new Comm;
    c->size = size;
    c->rank = rank;
    u64 name;
    memcpy(&name, id.bytes, 8);
    snprintf(c->path, sizeof c->path, "/dev/shm/hipemu-rccl-%016llx", (unsigned long long)name);
    const size_t bytes = sizeof(CommMemory) + (size_t)(size - 1) * sizeof(RankSlots) + (size_t)size * size * sizeof(Mailbox);
    const int file = open(c->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    void* at = MAP_FAILED;
    if (file >= 0 && ftruncate(file, (off_t)bytes) == 0)
        at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (at == MAP_FAILED) {
        delete c;
        return SYSTEM_ERROR;
    }
    c->memory = (CommMemory*)at;
    if (c->memory->joined.fetch_add(1) + 1 == size) unlink(c->path);
    *out = c;
    return IN_PROGRESS;
}

HIP int ncclCommGetAsyncError(Comm* c, int* code) {
    *code = c->memory->joined < c->size ? IN_PROGRESS : SUCCESS;
    return SUCCESS;
}

// The communicator is not freed: captured graphs and calls of other threads may still refer to it.
HIP int ncclCommAbort(Comm* c) {
    c->aborted = true;
    if (c->memory->joined < c->size) unlink(c->path);
    return SUCCESS;
}
HIP int ncclCommFinalize(Comm*) { return SUCCESS; }
HIP int ncclCommDestroy(Comm* c) { return ncclCommAbort(c); }

HIP int ncclAllReduce(const u8* from, u8* to, size_t count, int type, int op, Comm* c, Stream* s) {
    if (!can_reduce(type) || op != 0) return INVALID_ARGUMENT;
    return put_work(c, s, [=] { sum(c, from, to, count, type); });
}

HIP int ncclAllGather(const u8* from, u8* to, size_t count, int type, Comm* c, Stream* s) {
    const size_t all = count * bytes_of(type);
    return put_work(c, s, [=] {
        pieces(all, [&](size_t at, size_t bytes) {
            if (!c->round(from + at, bytes)) return false;
            for (int rank = 0; rank < c->size; ++rank) memcpy(to + rank * all + at, c->slot(rank), bytes);
            return true;
        });
    });
}

HIP int ncclReduceScatter(const u8* from, u8* to, size_t count, int type, int op, Comm* c, Stream* s) {
    if (!can_reduce(type) || op != 0) return INVALID_ARGUMENT;
    const size_t own = count * bytes_of(type);
    return put_work(c, s, [=] {
        std::vector<u8> sums(own * c->size);
        sum(c, from, sums.data(), count * c->size, type);
        memcpy(to, sums.data() + own * c->rank, own);
    });
}

HIP int ncclBroadcast(const u8* from, u8* to, size_t count, int type, int root, Comm* c, Stream* s) {
    if (root < 0 || root >= c->size) return INVALID_ARGUMENT;
    return put_work(c, s, [=] {
        pieces(count * bytes_of(type), [&](size_t at, size_t bytes) {
            if (!c->round(from + at, c->rank == root ? bytes : 0)) return false;
            memcpy(to + at, c->slot(root), bytes);
            return true;
        });
    });
}

HIP int ncclSend(u8* from, size_t count, int type, int peer, Comm* c, Stream* s) {
    return transfer(true, from, count, type, peer, c, s);
}
HIP int ncclRecv(u8* to, size_t count, int type, int peer, Comm* c, Stream* s) {
    return transfer(false, to, count, type, peer, c, s);
}

HIP int ncclGroupStart() {
    if (group.open) return INVALID_USAGE;
    group = RcclGroupCall{};
    group.open = true;
    return SUCCESS;
}
HIP int ncclGroupEnd() {
    RcclGroupCall done;
    std::swap(done, group);
    if (!done.open) return INVALID_USAGE;
    if (!done.comm) return SUCCESS;
    return put_work(done.comm, done.stream, [=] { exchange(done.comm, done.transfers); });
}
