// grid_run.h - runs the blocks of a launch, on several host threads if the launch is large. `B` is the type
// of a block, such as Block (block.h), with the members run(), note_progress() and `failure`.
#pragma once
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "block.h"
#include "settings.h"

namespace emu {

// Stores the first failure of the process for last_failure(), and prints it.
void set_failure(const std::string& text);

// Minimum number of GPU threads in a launch for which several host threads are used.
const u64 MIN_PARALLEL_THREADS = 4096;

// Detects a deadlock when all remaining blocks of a host thread wait for other blocks: pending() returns
// false once `progress` has not changed for the duration of the progress timeout.
struct ProgressTimeout {
    using Clock = std::chrono::steady_clock;
    u64 last_progress = 0;
    Clock::time_point last_change = Clock::now();

    bool pending(u64 progress) {
        const auto limit = std::chrono::milliseconds(settings().progress_timeout_ms);
        if (progress == last_progress) return Clock::now() - last_change < limit;
        last_progress = progress;
        last_change = Clock::now();
        return true;
    }
};

template <class B> struct GridRun {
    std::function<void(B&, u64)> begin;  // starts a block, by its index
    std::function<void(B&)> finish;      // sees a finished block, one at a time; may be empty
    std::atomic<u64> progress{0};

    GridRun(std::string kernel, const Launch& launch)
        : name(std::move(kernel)), blocks((u64)launch.grid.x * launch.grid.y * launch.grid.z), threads(blocks * launch.threads) {}

    // Runs all blocks on at most `host_threads` host threads. Returns false if a block failed.
    bool all(u64 host_threads) {
        if (threads < MIN_PARALLEL_THREADS) host_threads = 1;
        std::vector<std::thread> workers;
        for (u64 i = 1; i < std::min(host_threads, blocks); ++i) workers.emplace_back([this] { work(); });
        work();
        for (std::thread& t : workers) t.join();
        return !rule_violated;
    }

private:
    typedef std::unique_ptr<B> Owned;

    Owned take() {
        std::lock_guard<std::mutex> guard(lock);
        if (free_blocks.empty()) return std::make_unique<B>();
        Owned block = std::move(free_blocks.back());
        free_blocks.pop_back();
        return block;
    }
    void put(Owned block) {
        std::lock_guard<std::mutex> guard(lock);
        if (finish) finish(*block);
        free_blocks.push_back(std::move(block));
    }
    void fail(const std::string& text) {
        if (!rule_violated.exchange(true)) set_failure(text);
    }

    // Resumes `block`. If it then waits for other blocks, adds it to `waiting`.
    void resume(Owned block, std::deque<Owned>& waiting) {
        switch (block->run()) {
            case BlockOutcome::FINISHED: block->note_progress(); put(std::move(block)); break;
            case BlockOutcome::WAITING: waiting.push_back(std::move(block)); break;
            case BlockOutcome::RULE_VIOLATED: fail(block->failure); break;
        }
    }

    void work() {
        std::deque<Owned> waiting;
        ProgressTimeout timeout;
        while (!rule_violated) {
            const u64 index = next++;
            if (index < blocks) {
                Owned block = take();
                begin(*block, index);
                resume(std::move(block), waiting);
            } else if (!waiting.empty()) {
                Owned block = std::move(waiting.front());
                waiting.pop_front();
                resume(std::move(block), waiting);
                if (!timeout.pending(progress)) fail("kernel " + name + ": no progress: deadlock");
                std::this_thread::yield();
            } else {
                break;
            }
        }
    }

    // Finished `B` objects, which later launches reuse.
    static inline std::mutex lock;
    static inline std::vector<Owned> free_blocks;

    const std::string name;
    const u64 blocks, threads;
    std::atomic<u64> next{0};
    std::atomic<bool> rule_violated{false};
};

}  // namespace emu
