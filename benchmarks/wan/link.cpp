// Emulates one WAN link between two network namespaces: each packet waits for its turn at the link's rate, and then for the link's delay.
//
//   link NAMESPACE-A DEVICE-A NAMESPACE-B DEVICE-B BITS-PER-SECOND MICROSECONDS QUEUE-MICROSECONDS
//
// It makes a TUN device in each namespace, prints "ready", and moves packets both ways until its standard input ends. A line on standard
// input with three numbers sets rate, delay (one way) and queue anew. A packet that would wait longer than the queue allows is dropped.
// Packets keep the offloads of the kernel, so one of them may carry up to 64 KiB that a real link would send as several.

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <thread>

namespace {

constexpr size_t kMostPacket = (1 << 16) + 256;
constexpr size_t kRing = size_t{1} << 29;  // bytes in flight in one direction; pages are used only as packets need them
constexpr size_t kHeader = 10;  // the size of virtio_net_hdr, whose header C++ cannot include
constexpr int kBatch = 64;
constexpr int kPriority = -15;  // a real link does not wait for a processor

struct Shape {
    std::atomic<double> nanoseconds_per_byte{0};
    std::atomic<int64_t> delay{0};
    std::atomic<int64_t> queue{0};

    void set(double bits_per_second, int64_t delay_us, int64_t queue_us) {
        nanoseconds_per_byte = 8e9 / bits_per_second;
        delay = delay_us * 1000;
        queue = queue_us * 1000;
    }
};

Shape shape;

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "link: %s: %s\n", what.c_str(), std::strerror(errno));
    std::exit(1);
}

int64_t now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

int open_device(const std::string& space, const std::string& name) {
    const std::string path = "/run/netns/" + space;
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) fail(path);
    if (setns(descriptor, CLONE_NEWNET) != 0) fail("setns " + space);
    close(descriptor);
    const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (device < 0) fail("/dev/net/tun");
    ifreq request{};
    request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
    std::strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
    if (ioctl(device, TUNSETIFF, &request) != 0) fail("TUNSETIFF " + name);
    if (ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) != 0) fail("TUNSETOFFLOAD " + name);
    return device;
}

struct Packet {
    int64_t release;
    size_t at;
    size_t size;
};

// Moves the packets of one direction. The ring holds their bytes in order, so its free part is between the newest and the oldest packet.
void move_packets(int from, int to) {
    prctl(PR_SET_TIMERSLACK, 1);
    auto* ring = static_cast<uint8_t*>(mmap(nullptr, kRing, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (ring == MAP_FAILED) fail("mmap");
    std::deque<Packet> waiting;
    size_t next = 0;
    int64_t busy_until = 0;
    while (true) {
        const int64_t until = waiting.empty() ? 1'000'000'000 : std::max<int64_t>(0, waiting.front().release - now());
        const timespec timeout{until / 1'000'000'000, until % 1'000'000'000};
        pollfd ready{from, POLLIN, 0};
        if (ppoll(&ready, 1, &timeout, nullptr) < 0 && errno != EINTR) fail("ppoll");
        if (ready.revents & (POLLERR | POLLNVAL)) return;
        for (int count = 0; count < kBatch && (ready.revents & POLLIN); ++count) {
            if (kRing - next < kMostPacket) next = 0;
            const bool is_full = !waiting.empty() && waiting.front().at >= next && waiting.front().at - next < kMostPacket;
            uint8_t scratch[kMostPacket];
            uint8_t* target = is_full ? scratch : ring + next;
            const ssize_t size = read(from, target, kMostPacket);
            if (size < 0 && (errno == EAGAIN || errno == EINTR)) break;
            if (size <= 0) return;
            const int64_t time = now();
            const int64_t begin = std::max(busy_until, time);
            if (is_full || begin - time > shape.queue) continue;  // dropped
            busy_until = begin + static_cast<int64_t>(shape.nanoseconds_per_byte * static_cast<double>(size - kHeader));
            waiting.push_back({busy_until + shape.delay, next, static_cast<size_t>(size)});
            next += static_cast<size_t>(size);
        }
        for (int64_t time = now(); !waiting.empty() && waiting.front().release <= time; waiting.pop_front()) {
            const Packet& packet = waiting.front();
            if (write(to, ring + packet.at, packet.size) < 0 && errno != EAGAIN && errno != EINTR && errno != EIO) return;
        }
    }
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 8) {
        std::fprintf(stderr, "usage: link NAMESPACE DEVICE NAMESPACE DEVICE BITS-PER-SECOND DELAY-US QUEUE-US\n");
        return 2;
    }
    setpriority(PRIO_PROCESS, 0, kPriority);
    shape.set(std::atof(arguments[5]), std::atoll(arguments[6]), std::atoll(arguments[7]));
    const int one = open_device(arguments[1], arguments[2]);
    const int other = open_device(arguments[3], arguments[4]);
    std::thread(move_packets, one, other).detach();
    std::thread(move_packets, other, one).detach();
    std::puts("ready");
    std::fflush(stdout);
    char line[256];
    while (std::fgets(line, sizeof line, stdin) != nullptr) {
        double rate = 0;
        long long delay = 0;
        long long queue = 0;
        if (std::sscanf(line, "%lf %lld %lld", &rate, &delay, &queue) == 3 && rate > 0) shape.set(rate, delay, queue);
        std::puts("set");
        std::fflush(stdout);
    }
    _Exit(0);
}
