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
static const u64 MIN_PARALLEL_THREADS = 4096;

static std::mutex lock;
static std::vector<std::unique_ptr<Block>> free_blocks;
static std::string failure;

const char* last_failure() { return failure.c_str(); }

namespace {

// Deadlock detection of a host thread whose blocks wait: pending() is false if `progress` has not changed for
// the progress timeout.
struct ProgressTimeout {
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

struct Run {
    Grid grid;
    u64 blocks;
    std::atomic<u64> next{0};
    std::atomic<bool> rule_violated{false};
    std::atomic<u64> progress{0};

    std::unique_ptr<Block> take() {
        std::lock_guard<std::mutex> guard(lock);
        if (free_blocks.empty()) return std::make_unique<Block>();
        auto block = std::move(free_blocks.back());
        free_blocks.pop_back();
        return block;
    }
    void put(std::unique_ptr<Block> block) {
        std::lock_guard<std::mutex> guard(lock);
        free_blocks.push_back(std::move(block));
    }
    void fail(const std::string& text) {
        if (rule_violated.exchange(true)) return;
        fprintf(stderr, "hipemu: %s\n", text.c_str());
        std::lock_guard<std::mutex> guard(lock);
        failure = text;
    }

    // Resumes `block`; moves it to `waiting` if it waits for other blocks.
    void resume(std::unique_ptr<Block> block, std::deque<std::unique_ptr<Block>>& waiting) {
        switch (block->run()) {
            case Outcome::FINISHED: block->note_progress(); put(std::move(block)); break;
            case Outcome::WAITING: waiting.push_back(std::move(block)); break;
            case Outcome::RULE_VIOLATED: fail(block->failure); break;
        }
    }

    void work() {
        std::deque<std::unique_ptr<Block>> waiting;
        ProgressTimeout timeout;
        while (!rule_violated) {
            const u64 index = next++;
            if (index < blocks) {
                auto block = take();
                block->begin(grid, index);
                resume(std::move(block), waiting);
            } else if (!waiting.empty()) {
                auto block = std::move(waiting.front());
                waiting.pop_front();
                resume(std::move(block), waiting);
                if (!timeout.pending(progress)) fail(std::string("kernel ") + grid.name + ": no progress: deadlock");
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
    const std::unique_ptr<ClusterBlockState[]> cluster_states(new ClusterBlockState[run.blocks]);
    run.grid = {&launch, wave, entry, args, name, settings().seed, cluster_states.get(), &run.progress};
    u64 host_threads = run.blocks * launch.threads < MIN_PARALLEL_THREADS ? 1 : settings().threads;
    if (races_watched()) host_threads = 1;  // Only races within a block are then checked.
    std::vector<std::thread> workers;
    for (u64 i = 1; i < std::min(host_threads, run.blocks); ++i) workers.emplace_back([&run] { run.work(); });
    run.work();
    for (std::thread& t : workers) t.join();
    return !run.rule_violated;
}

}  // namespace emu
