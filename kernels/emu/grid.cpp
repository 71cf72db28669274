// grid.cpp - runs the blocks of a launch, on several host threads if there are many.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <deque>
#include <mutex>
#include <thread>

#include "block.h"
#include "settings.h"

namespace emu {

using Clock = std::chrono::steady_clock;

// Minimum number of GPU threads for which a second host thread pays off.
static const u64 THREADS_WORTH_SHARING = 4096;

static std::mutex lock;
static std::vector<std::unique_ptr<Block>> at_rest;
static std::string failure;

const char* last_failure() { return failure.c_str(); }

namespace {

// Progress timeout of a host thread with waiting blocks.
struct Patience {
    u64 seen = 0;
    Clock::time_point since = Clock::now();

    bool lasts(u64 moves) {
        if (moves == seen) return Clock::now() - since < std::chrono::milliseconds(settings().patience_ms);
        seen = moves;
        since = Clock::now();
        return true;
    }
};

struct Run {
    Grid grid;
    u64 blocks;
    std::atomic<u64> next{0};
    std::atomic<bool> broken{false};
    std::atomic<u64> moves{0};

    std::unique_ptr<Block> take() {
        std::lock_guard<std::mutex> guard(lock);
        if (at_rest.empty()) return std::make_unique<Block>();
        auto block = std::move(at_rest.back());
        at_rest.pop_back();
        return block;
    }
    void put(std::unique_ptr<Block> block) {
        std::lock_guard<std::mutex> guard(lock);
        at_rest.push_back(std::move(block));
    }
    void fail(const std::string& text) {
        if (broken.exchange(true)) return;
        fprintf(stderr, "hipemu: %s\n", text.c_str());
        std::lock_guard<std::mutex> guard(lock);
        failure = text;
    }

    // Resumes `block`; moves it to `waiting` if it waits for other blocks.
    void go_on(std::unique_ptr<Block> block, std::deque<std::unique_ptr<Block>>& waiting) {
        switch (block->run()) {
            case Outcome::FINISHED: block->moved(); put(std::move(block)); break;
            case Outcome::WAITING: waiting.push_back(std::move(block)); break;
            case Outcome::BROKEN: fail(block->failure); break;
        }
    }

    void work() {
        std::deque<std::unique_ptr<Block>> waiting;
        Patience patience;
        while (!broken) {
            const u64 index = next++;
            if (index < blocks) {
                auto block = take();
                block->begin(grid, index);
                go_on(std::move(block), waiting);
            } else if (!waiting.empty()) {
                auto block = std::move(waiting.front());
                waiting.pop_front();
                go_on(std::move(block), waiting);
                if (!patience.lasts(moves)) fail(std::string("kernel ") + grid.name + ": waits for what no thread does");
                std::this_thread::yield();
            } else {
                break;
            }
        }
    }
};

}  // namespace

bool run(const Launch& launch, u32 wave, void (*entry)(void*), void* args, const char* name) {
    Run run;
    run.blocks = (u64)launch.grid.x * launch.grid.y * launch.grid.z;
    const std::unique_ptr<Seat[]> seats(new Seat[run.blocks]);
    run.grid = {&launch, wave, entry, args, name, settings().seed, seats.get(), &run.moves};
    u64 helpers = run.blocks * launch.threads < THREADS_WORTH_SHARING ? 1 : settings().threads;
    if (races_watched()) helpers = 1;  // One host thread orders the blocks; races within a block are checked.
    std::vector<std::thread> others;
    for (u64 i = 1; i < std::min(helpers, run.blocks); ++i) others.emplace_back([&run] { run.work(); });
    run.work();
    for (std::thread& t : others) t.join();
    return !run.broken;
}

}  // namespace emu
