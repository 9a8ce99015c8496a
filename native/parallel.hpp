// Runs independent units of work on a few threads.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace deltawire {

// Calls `work(workers[t], i)` for all i < n. Thread t uses worker t. If there are several errors, it throws the one with the smallest i.
// It allocates only threads, and works with fewer threads if the system refuses more.
template <class Worker, class Work>
void parallel_for(size_t n, std::vector<Worker>& workers, Work work) {
    std::atomic<size_t> next{0};
    std::mutex mutex;
    std::exception_ptr error;
    size_t error_at = n;
    const auto run = [&](Worker& worker) {
        size_t i = n;
        try {
            while ((i = next.fetch_add(1, std::memory_order_relaxed)) < n) work(worker, i);
        } catch (...) {
            const std::scoped_lock lock(mutex);
            if (i < error_at) error = std::current_exception(), error_at = i;
            next.store(n, std::memory_order_relaxed);
        }
    };
    std::vector<std::thread> pool;
    try {
        for (size_t t = 1; t < workers.size() && t < n; ++t) pool.emplace_back([&run, &worker = workers[t]] { run(worker); });
    } catch (const std::exception&) {
    }
    run(workers[0]);
    for (auto& thread : pool) thread.join();
    if (error) std::rethrow_exception(error);
}

}  // namespace deltawire
