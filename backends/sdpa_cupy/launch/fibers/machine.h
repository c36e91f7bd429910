// The threads of a block, each a fiber of the one processor thread that runs them, and where they wait for one another.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "switch.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Of this library; were they not hidden, the loader would take the end of the executable.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[], _end[];

namespace fibers {

using Byte = unsigned char;
using Address = uintptr_t;
constexpr int kWarp = 32, kThreads = 1024;
constexpr size_t kStack = 128 << 10, kShared = 228 << 10;

enum Order : int { kUp, kDown, kRandom };

struct Span {  // memory that the kernel may read
    Address start, stop;
    int writable;
};

struct Job {
    void (*entry)(const void*);
    const void* parameters;
    uint64_t parameters_size;
    int grid[3];
    int threads;
    int shared;
    int order;  // of the threads and blocks
    int late;   // whether asynchronous copies land when they are waited for, or at once
    int first;  // number of the first block that runs
    int arch;   // whose tensor cores add up
    int watched;  // whether the kernel was built with calls before each access
    const Span* spans;
    int span_count;
};

struct Counts {
    int64_t switches, barriers, products, matrices, shuffles, copies;
};

struct Fault {
    char message[512];
    Address place, address;  // in the kernel's code, and what it touched (0: no matter)
    int block[3], thread;
};

struct Access {  // of shared memory by one thread
    const void* place;
    Address address;
    int bytes;
};

struct Copy {
    Byte* to;
    const Byte* from;
    const void* place;
};

struct Conflicts {  // of the shared memory's banks, at one place: the steps that they took, and the least possible
    Address place;
    int64_t steps, least;
};

struct Outcome {
    Counts counts;
    Fault fault;
    Conflicts conflicts[1024];
    int places;
};

struct Thread {
    Context context;
    enum { kReady, kAtCollective, kAtBarrier, kDone } state;
    const void* place;
    void* operands;
    std::vector<Copy> copies;    // under way, the oldest first
    std::vector<size_t> groups;  // how many of them were under way at each commit
    std::vector<Access> accesses;
};

struct Warp {
    const char* collective;  // its name, while lanes wait there
    int arrived;
};

struct Cell {  // what happened last to one byte of shared memory, see memory.cpp
    uint64_t written, read;
};

struct Machine {
    Job job;
    Counts counts;
    Fault fault;
    bool failed;
    int block[3], current, live, waiting;
    bool flag, any_flag;  // of the threads that wait at a barrier, and of those that met at the last
    uint64_t now, begun;  // a clock that ticks at barriers, and when the block began
    uint32_t seed;
    Context scheduler;
    Thread threads[kThreads];
    Warp warps[kThreads / kWarp];
    Byte* shared;
    char* stacks;
    std::vector<Cell> cells;
    std::unordered_map<const void*, Conflicts> conflicts;

    Thread& thread() { return threads[current]; }
    Warp& warp() { return warps[current / kWarp]; }
};

extern Machine* machine;  // one for each library, which runs one launch at a time

// Records what is wrong, at a place in the code and an address; the first fault counts.
void record(const void* place, Address address, const char* format, ...) __attribute__((format(printf, 3, 4)));

// Leaves the fiber, which goes on when it is ready again.
void pause();

// Meets the other lanes of the warp; the last to come performs the operation on the operands of all.
void meet(const char* name, const void* place, void* operands, void (*perform)(void* const* operands));

// Meets all threads of the block; returns whether any of them came with the flag.
bool meet_all(const void* place, bool flag);

// Runs all blocks; returns whether no fault was found.
bool run(const Job& job);

#define FAIL(place, address, ...)            \
    do {                                     \
        record(place, address, __VA_ARGS__); \
        for (;;) pause();                    \
    } while (0)

}  // namespace fibers
