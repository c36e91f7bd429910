// The compiler calls __tsan_read4(address) and the like before each access, as it would for its own race detector. Here
// these calls check the access: a race in shared memory is found from the clock, whatever order the fibers ran in.
#include "memory.h"

#include <algorithm>
#include <iterator>

namespace fibers {

// A stamp is a time and a thread, or several threads, or a thread whose copy is under way.
enum : uint64_t { kOne = 0, kSeveral = 1 << 10, kFlying = 2 << 10, kWho = 3 << 10 };
constexpr int kClock = 12;

static uint64_t stamp(uint64_t who) { return machine->now << kClock | who | uint64_t(machine->current); }
static int thread_of(uint64_t stamp) { return int(stamp & (kThreads - 1)); }
static bool recent(uint64_t stamp) { return stamp >> kClock == machine->now; }  // since the last barrier
static bool by_others(uint64_t stamp) { return (stamp & kWho) != kOne || thread_of(stamp) != machine->current; }

static void race(uint64_t stamp, const char* now, const char* before, const Byte* byte, const void* place) {
    long offset = byte - machine->shared;
    if ((stamp & kWho) == kFlying)
        FAIL(place, 0, "%s byte %ld of shared memory, where an asynchronous copy of thread %d is under way", now,
             offset, thread_of(stamp));
    if ((stamp & kWho) == kSeveral)
        FAIL(place, 0, "race: %s byte %ld of shared memory, which several threads %s, with no barrier between", now,
             offset, before);
    FAIL(place, 0, "race: %s byte %ld of shared memory, which thread %d %s, with no barrier between", now, offset,
         thread_of(stamp), before);
}

static void check_order(uint64_t stamp, const char* now, const char* before, const Byte* byte, const void* place) {
    bool flying = (stamp & kWho) == kFlying && stamp >> kClock >= machine->begun;
    if (flying || (recent(stamp) && by_others(stamp))) race(stamp, now, before, byte, place);
}

static void read_cell(Cell& cell, const Byte* byte, const void* place) {
    if (machine->job.watched && cell.written >> kClock < machine->begun)
        FAIL(place, 0, "reads byte %ld of shared memory, which nobody wrote", long(byte - machine->shared));
    check_order(cell.written, "reads", "wrote", byte, place);
    cell.read = stamp(recent(cell.read) && by_others(cell.read) ? kSeveral : kOne);
}

static void write_cell(Cell& cell, const Byte* byte, const void* place) {
    check_order(cell.written, "writes", "wrote", byte, place);
    check_order(cell.read, "writes", "read", byte, place);
    cell.written = stamp(kOne);
}

static void mark(Kind kind, const void* address, size_t bytes, const void* place) {
    const Byte* byte = static_cast<const Byte*>(address);
    Cell* cells = machine->cells.data() + (byte - machine->shared);
    bool alike = memcmp(cells, cells + 1, (bytes - 1) * sizeof(Cell)) == 0;  // as most are: one look is enough
    for (size_t i = 0; i < (alike ? 1 : bytes); i++) {
        if (kind == kRead) {
            read_cell(cells[i], byte + i, place);
        } else {
            write_cell(cells[i], byte + i, place);
        }
    }
    if (alike) std::fill(cells + 1, cells + bytes, cells[0]);
}

static bool within(const void* address, size_t bytes, const void* start, size_t size) {
    Address a = reinterpret_cast<Address>(address), s = reinterpret_cast<Address>(start);
    return a >= s && a - s <= size && size - (a - s) >= bytes;
}

static void check_global(Kind kind, const char* what, const void* address, size_t bytes, const void* place) {
    const Job& job = machine->job;
    for (const Span* span = job.spans; span < job.spans + job.span_count; span++)
        if (within(address, bytes, reinterpret_cast<const void*>(span->start), span->stop - span->start) &&
            (kind == kRead || span->writable))
            return;
    FAIL(place, reinterpret_cast<Address>(address), "%s %zu bytes of global memory outside every %sarray", what, bytes,
         kind == kRead ? "" : "writable ");
}

void check_shared(Kind kind, const void* address, size_t bytes, const char* what, const void* place) {
    const Machine& m = *machine;
    if (reinterpret_cast<Address>(address) % bytes)
        FAIL(place, 0, "%s: the address in shared memory is no multiple of %zu", what, bytes);
    if (!within(address, bytes, m.shared, size_t(m.job.shared)))
        FAIL(place, 0, "%s: byte %ld is outside the %d bytes of shared memory", what,
             long(static_cast<const Byte*>(address) - m.shared), m.job.shared);
    mark(kind, address, bytes, place);
}

void check(Kind kind, const void* address, size_t bytes, bool aligned, const void* place) {
    Machine& m = *machine;
    if (within(address, bytes, m.stacks, kThreads * kStack)) return;
    const char* what = kind == kRead ? "reads" : "writes";
    if (aligned && reinterpret_cast<Address>(address) % bytes)
        FAIL(place, reinterpret_cast<Address>(address), "%s %zu bytes at an address that is no multiple of it", what,
             bytes);
    if (within(address, 1, m.shared, kShared)) {
        if (!within(address, bytes, m.shared, size_t(m.job.shared)))
            FAIL(place, 0, "%s byte %ld, outside the %d bytes of shared memory", what,
                 long(static_cast<const Byte*>(address) - m.shared), m.job.shared);
        mark(kind, address, bytes, place);
        m.thread().accesses.push_back({place, reinterpret_cast<Address>(address), int(bytes)});
        return;
    }
    bool constant = within(address, bytes, m.job.parameters, m.job.parameters_size) ||
                    within(address, bytes, __ehdr_start, size_t(_end - __ehdr_start));
    if (kind == kWrite || !constant) check_global(kind, what, address, bytes, place);
}

void served(const Access* accesses, int count) {
    // Up to 32 words of 4 bytes are served at a time; each bank has every 32nd word and gives one of them to all
    // lanes that read it.
    int together = accesses[0].bytes <= 4 ? kWarp : kWarp * 4 / accesses[0].bytes, steps = 0, least = 0;
    for (int first = 0; first < count; first += together, least++) {
        Address asked[32][32];
        int load[32] = {}, most = 0;
        for (int i = first; i < std::min(first + together, count); i++)
            for (Address word = accesses[i].address / 4; word * 4 < accesses[i].address + accesses[i].bytes; word++) {
                Address* bank = asked[word % 32];
                int& n = load[word % 32];
                if (std::find(bank, bank + n, word) == bank + n) bank[n++] = word;
                most = std::max(most, n);
            }
        steps += most;
    }
    Conflicts& known = machine->conflicts[accesses[0].place];
    known.steps += steps;
    known.least += least;
}

void settle(Thread* lanes) {
    size_t next[kWarp] = {};
    for (int leader = 0; leader < kWarp;) {
        if (next[leader] == lanes[leader].accesses.size()) {
            leader++;
            continue;
        }
        Access request[kWarp];
        int count = 0;
        const void* place = lanes[leader].accesses[next[leader]].place;
        for (int lane = leader; lane < kWarp; lane++) {
            const auto& own = lanes[lane].accesses;
            if (next[lane] < own.size() && own[next[lane]].place == place) request[count++] = own[next[lane]++];
        }
        served(request, count);
    }
    for (int lane = 0; lane < kWarp; lane++) lanes[lane].accesses.clear();
}

static void land(const Copy& copy) {
    memcpy(copy.to, copy.from, 16);
}

void begin_copy(const Copy& copy) {
    Machine& m = *machine;
    Thread& thread = m.thread();
    auto [to, from, place] = copy;
    check_shared(kWrite, to, 16, "an asynchronous copy", place);
    if (reinterpret_cast<Address>(from) % 16)
        FAIL(place, reinterpret_cast<Address>(from),
             "an asynchronous copy of 16 bytes at an address that is no multiple");
    check_global(kRead, "copies", from, 16, place);
    m.counts.copies++;
    thread.accesses.push_back({place, reinterpret_cast<Address>(to), 16});
    Cell* cells = m.cells.data() + (to - m.shared);
    for (int i = 0; i < 16; i++) cells[i].written = stamp(kFlying);
    thread.copies.push_back(copy);
    if (m.job.late) {
        memset(to, 0xff, 16);
    } else {
        land(copy);
    }
}

void finish_copies(size_t groups_left) {
    Machine& m = *machine;
    Thread& thread = m.thread();
    if (thread.groups.size() <= groups_left) return;
    size_t landed = thread.groups[thread.groups.size() - groups_left - 1];
    for (size_t i = 0; i < landed; i++) {
        const Copy& copy = thread.copies[i];
        if (m.job.late) land(copy);
        Cell* cells = m.cells.data() + (copy.to - m.shared);
        for (int byte = 0; byte < 16; byte++) cells[byte].written = stamp(kOne);
    }
    thread.copies.erase(thread.copies.begin(), thread.copies.begin() + long(landed));
    thread.groups.erase(thread.groups.begin(), thread.groups.end() - long(groups_left));
    for (size_t& group : thread.groups) group -= landed;
}

}  // namespace fibers

using fibers::check, fibers::kRead, fibers::kWrite;

#define HERE __builtin_return_address(0)
#define HOOKS(bytes)                                                                             \
    void __tsan_read##bytes(void* at) { check(kRead, at, bytes, true, HERE); }                   \
    void __tsan_write##bytes(void* at) { check(kWrite, at, bytes, true, HERE); }                 \
    void __tsan_unaligned_read##bytes(void* at) { check(kRead, at, bytes, false, HERE); }        \
    void __tsan_unaligned_write##bytes(void* at) { check(kWrite, at, bytes, false, HERE); }

extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* at, size_t bytes) { check(kRead, at, bytes, false, HERE); }
void __tsan_write_range(void* at, size_t bytes) { check(kWrite, at, bytes, false, HERE); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
