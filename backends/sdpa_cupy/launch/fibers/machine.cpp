// Scheduling: one fiber at a time, until it waits for others. Up and down are greedy, so that a warp runs as far ahead
// of the others as barriers allow; random mixes them. A kernel without races gives the same bits in every order.
#include "machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>

#include "memory.h"

// Of the address sanitizer, where it is loaded.
extern "C" __attribute__((weak)) void __asan_poison_memory_region(const volatile void* start, size_t bytes);
extern "C" __attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* start, size_t bytes);

namespace fibers {

Machine* machine;

void record(const void* place, Address address, const char* format, ...) {
    Machine& m = *machine;
    if (m.failed) return;
    m.failed = true;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(m.fault.message, sizeof m.fault.message, format, arguments);
    va_end(arguments);
    m.fault.place = reinterpret_cast<Address>(place);
    m.fault.address = address;
    std::copy(m.block, m.block + 3, m.fault.block);
    m.fault.thread = m.current;
}

void pause() {
    machine->counts.switches++;
    change(machine->thread().context, machine->scheduler);
}

void meet(const char* name, const void* place, void* operands, void (*perform)(void* const*)) {
    Machine& m = *machine;
    Warp& warp = m.warp();
    m.thread().operands = operands;
    m.thread().place = place;
    if (warp.arrived && strcmp(warp.collective, name) != 0)
        FAIL(place, 0, "this lane comes to %s, others of its warp wait at %s", name, warp.collective);
    warp.collective = name;
    Thread* lanes = m.threads + m.current / kWarp * kWarp;
    if (++warp.arrived < kWarp) {
        m.thread().state = Thread::kAtCollective;
        pause();
        return;
    }
    void* all[kWarp];
    for (int lane = 0; lane < kWarp; lane++) all[lane] = lanes[lane].operands;
    perform(all);
    warp.arrived = 0;
    for (int lane = 0; lane < kWarp; lane++)
        if (lanes[lane].state == Thread::kAtCollective) lanes[lane].state = Thread::kReady;
    settle(lanes);
}

bool meet_all(const void* place, bool flag) {
    Machine& m = *machine;
    m.thread().place = place;
    m.flag |= flag;
    if (++m.waiting < m.job.threads) {
        m.thread().state = Thread::kAtBarrier;
        pause();
        return m.any_flag;
    }
    m.any_flag = m.flag;
    m.flag = false;
    m.waiting = 0;
    m.counts.barriers++;
    m.now++;
    for (int i = 0; i < m.job.threads; i++)
        if (m.threads[i].state == Thread::kAtBarrier) m.threads[i].state = Thread::kReady;
    for (int i = 0; i < m.job.threads; i += kWarp) settle(m.threads + i);
    return m.any_flag;
}

static void first_function() {
    Machine& m = *machine;
    m.job.entry(m.job.parameters);
    Thread& thread = m.thread();
    if (!thread.copies.empty())
        record(thread.copies.back().place, 0, "the thread ends before it waited for this asynchronous copy");
    thread.state = Thread::kDone;
    m.live--;
    for (;;) pause();
}

// Records how threads wait for one another, none of which can go on.
static void deadlock() {
    Machine& m = *machine;
    int done = m.job.threads - m.live;
    std::string waits;
    for (int w = 0; w < m.job.threads / kWarp; w++)
        if (const Warp& warp = m.warps[w]; warp.arrived)
            waits +=
                "; " + std::to_string(warp.arrived) + " lanes of warp " + std::to_string(w) + " at " + warp.collective;
    m.current = int(
        std::find_if(m.threads, m.threads + m.job.threads, [](const Thread& t) { return t.state != Thread::kDone; }) -
        m.threads);
    record(m.thread().place, 0, "deadlock: %d threads wait at a barrier, %d have ended%s", m.waiting, done,
           waits.c_str());
}

static uint32_t any_below(uint32_t n) {
    machine->seed = machine->seed * 1664525u + 1013904223u;
    return uint32_t(uint64_t(machine->seed >> 8) * n >> 24);
}

static int ready_lanes(int w) {
    const Thread* lanes = machine->threads + w * kWarp;
    return int(std::count_if(lanes, lanes + kWarp, [](const Thread& t) { return t.state == Thread::kReady; }));
}

// Returns the warp to run next, -1 where none can.
static int next_warp() {
    Machine& m = *machine;
    int warps = m.job.threads / kWarp, first = m.job.order == kRandom ? int(any_below(warps)) : 0;
    for (int i = 0; i < warps; i++) {
        int w = m.job.order == kDown ? warps - 1 - i : (first + i) % warps;
        if (ready_lanes(w)) return w;
    }
    return -1;
}

static void run_warp(int w) {
    Machine& m = *machine;
    int mask = m.job.order == kDown ? kWarp - 1 : m.job.order == kRandom ? int(any_below(kWarp)) : 0;
    for (int i = 0; i < kWarp && !m.failed; i++) {
        m.current = w * kWarp + (i ^ mask);
        if (m.thread().state == Thread::kReady) change(m.scheduler, m.thread().context);
    }
}

static void begin_block() {
    Machine& m = *machine;
    m.live = m.job.threads;
    m.waiting = 0;
    m.flag = false;
    m.begun = ++m.now;
    if (__asan_unpoison_memory_region) {
        __asan_unpoison_memory_region(m.stacks, size_t(m.job.threads) * kStack);
        __asan_unpoison_memory_region(m.shared, kShared);
        __asan_poison_memory_region(m.shared + m.job.shared, kShared - size_t(m.job.shared));
    }
    memset(m.shared, 0xff, size_t(m.job.shared));  // NaN in every type
    for (int i = 0; i < m.job.threads; i++) {
        Thread& thread = m.threads[i];
        thread.state = Thread::kReady;
        thread.copies.clear();
        thread.groups.clear();
        thread.accesses.clear();
        prepare(thread.context, m.stacks + size_t(i) * kStack, kStack, first_function);
    }
    for (Warp& warp : m.warps) warp.arrived = 0;
}

static bool run_block() {
    Machine& m = *machine;
    begin_block();
    while (m.live && !m.failed) {
        int w = next_warp();
        if (w < 0) {
            deadlock();
        } else {
            run_warp(w);
        }
    }
    for (int i = 0; i < m.job.threads && !m.failed; i += kWarp) settle(m.threads + i);
    return !m.failed;
}

static Machine* new_machine() {
    auto made = std::make_unique<Machine>();
    int protection = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* stacks = mmap(nullptr, kThreads * kStack, protection, flags, -1, 0);
    void* shared = mmap(nullptr, kShared, protection, flags, -1, 0);
    if (stacks == MAP_FAILED || shared == MAP_FAILED) return nullptr;
    made->stacks = static_cast<char*>(stacks);
    made->shared = static_cast<Byte*>(shared);
    made->cells.resize(kShared);
    return made.release();
}

bool run(const Job& job) {
    Machine& m = *machine;
    m.job = job;
    m.counts = {};
    m.fault = {};
    m.failed = false;
    m.seed = 1;
    m.conflicts.clear();
    if (job.threads > kThreads || job.threads % kWarp || size_t(job.shared) > kShared) {
        record(nullptr, 0, "no block can have %d threads and %d bytes of shared memory", job.threads, job.shared);
        return false;
    }
    int64_t blocks = int64_t(job.grid[0]) * job.grid[1] * job.grid[2], step = 1;
    if (job.order == kRandom)
        for (step = blocks * 5 / 8 + 1; std::gcd(step, blocks) != 1;) step++;
    for (int64_t i = 0; i < blocks; i++) {
        int64_t n = job.order == kDown ? blocks - 1 - i : i * step % blocks;
        if (n < job.first) continue;
        m.block[0] = int(n % job.grid[0]);
        m.block[1] = int(n / job.grid[0] % job.grid[1]);
        m.block[2] = int(n / job.grid[0] / job.grid[1]);
        if (!run_block()) return false;
    }
    return true;
}

}  // namespace fibers

// Runs a kernel; returns whether all went well, and in `outcome` what it did. Places are offsets into this library.
EXPORTED bool fibers_run(const fibers::Job* job, fibers::Outcome* outcome) {
    using fibers::machine;
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    if (!machine && !(machine = fibers::new_machine())) {
        snprintf(outcome->fault.message, sizeof outcome->fault.message, "no memory for the stacks of the fibers");
        return false;
    }
    bool right = fibers::run(*job);
    const fibers::Machine& m = *fibers::machine;
    auto base = reinterpret_cast<fibers::Address>(__ehdr_start);
    outcome->counts = m.counts;
    outcome->fault = m.fault;
    if (m.fault.place) outcome->fault.place -= base;
    outcome->places = 0;
    for (const auto& [place, conflicts] : m.conflicts) {
        if (outcome->places == int(std::size(outcome->conflicts))) break;
        outcome->conflicts[outcome->places] = conflicts;
        outcome->conflicts[outcome->places++].place = reinterpret_cast<fibers::Address>(place) - base;
    }
    return right;
}
