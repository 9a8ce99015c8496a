// Runs independent units of work on a few threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace deltawire {

// Admits threads to work that its caller may finish without them: on a busy machine, a new thread may wait for a processor longer than the work takes.
class Admission {
public:
    // Returns false if the work is over. A thread that is admitted calls `leave`.
    bool enter() {
        const std::scoped_lock lock(mutex_);
        if (closed_) return false;
        ++running_;
        return true;
    }
    void leave() {
        const std::scoped_lock lock(mutex_);
        if (--running_ == 0) idle_.notify_all();
    }
    // Admits no more threads, and waits for those that were admitted.
    void close() {
        std::unique_lock lock(mutex_);
        closed_ = true;
        idle_.wait(lock, [this] { return running_ == 0; });
    }

private:
    std::mutex mutex_;
    std::condition_variable idle_;
    unsigned running_ = 0;
    bool closed_ = false;
};

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
    std::shared_ptr<Admission> admission;
    try {
        if (workers.size() > 1 && n > 1) admission = std::make_shared<Admission>();
        for (size_t t = 1; t < workers.size() && t < n; ++t)
            std::thread([admission, &run, &worker = workers[t]] {  // touches nothing of the caller's unless it is admitted
                if (!admission->enter()) return;
                run(worker);
                admission->leave();
            }).detach();
    } catch (const std::exception&) {
    }
    run(workers[0]);
    if (admission) admission->close();
    if (error) std::rethrow_exception(error);
}

}  // namespace deltawire
