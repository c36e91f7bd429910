// The operations of the hardware, written from the instruction tables of the PTX manual: with g = lane / 4 and
// t = lane % 4, a lane has the rows g and g + 8 and the columns 2 * t and 2 * t + 1 of a tile.
#include "operations.h"

#include <algorithm>
#include <cmath>

#include "memory.h"
#include "numbers.h"

#define HERE __builtin_return_address(0)

namespace fibers {

struct Product {  // d += a b, in the registers of one lane
    float* d;
    const unsigned *a, *b;
};

static int exponent(float x, int least) {  // that of the smallest normal number for those below it
    return std::max(int(bits_of(x) >> 23 & 255) - 127, least);
}

static float cut(double x) {  // to float32; beyond its range it is infinite
    float near = float(x);
    return std::fabs(double(near)) > std::fabs(x) && std::fabs(x) < 0x1p128 ? std::nextafter(near, 0.0f) : near;
}

static double power(int exponent) {  // of 2, within the range of normal numbers
    const uint64_t bits = uint64_t(exponent + 1023) << 52;
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Returns the sum of c and of n products, as tensor cores add it up in one step: all terms are aligned to the largest
// exponent and cut off `bits` bits behind it, and so is their sum to float32. See launch/ptx/tensor.py for the sources.
static float fused_sum(const double* terms, const int* powers, int n, float c, int bits) {
    int largest = c ? exponent(c, -126) : -126;
    bool finite = std::isfinite(c);
    for (int k = 0; k < n; k++) {
        if (terms[k]) largest = std::max(largest, powers[k]);
        finite &= std::isfinite(terms[k]);
    }
    if (!finite) {
        double sum = c;
        for (int k = 0; k < n; k++) sum += terms[k];
        return float(sum);
    }
    double scale = power(bits - largest);
    int64_t sum = int64_t(c * scale);
    for (int k = 0; k < n; k++) sum += int64_t(terms[k] * scale);
    return cut(double(sum) * power(largest - bits));
}

// Adds the product of tiles A (16 x K) and B (K x 8) to the tile whose numbers lie in the lanes' d. `kBytes` are those of
// one of their numbers, `kLeast` is the exponent of the smallest normal one.
template <int K, int kBytes, int kLeast>
static void add_product(const float (&A)[16][K], const float (&B)[K][8], void* const* lanes) {
    machine->counts.products++;
    const bool hopper = machine->job.arch >= 90;
    const int bits = hopper ? 25 : 24, group = std::min((hopper ? 32 : 16) / kBytes, K);
    int below[16][K], right[8][K];
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < K; k++) below[i][k] = exponent(A[i][k], kLeast);
    for (int j = 0; j < 8; j++)
        for (int k = 0; k < K; k++) right[j][k] = exponent(B[k][j], kLeast);
    for (int lane = 0; lane < kWarp; lane++)
        for (int n = 0; n < 4; n++) {
            const int i = lane / 4 + n / 2 * 8, j = lane % 4 * 2 + n % 2;
            double terms[K];
            int powers[K];
            for (int k = 0; k < K; k++) {
                terms[k] = double(A[i][k]) * double(B[k][j]);
                powers[k] = below[i][k] + right[j][k];
            }
            float& d = static_cast<Product*>(lanes[lane])->d[n];
            for (int k = 0; k < K; k += group) d = fused_sum(terms + k, powers + k, group, d, bits);
        }
}

// Two 16-bit numbers a register: register r of a holds row g + 8 * (r % 2), columns 2 * t + 8 * (r / 2).
template <int K, float (*wide)(Half), int kLeast>
static void multiply_16_bit(void* const* lanes) {
    Half a[16][K], b[K][8];
    for (int lane = 0; lane < kWarp; lane++) {
        const auto& own = *static_cast<Product*>(lanes[lane]);
        int g = lane / 4, t = lane % 4;
        for (int r = 0; r < K / 4; r++)
            for (int n = 0; n < 2; n++) a[g + r % 2 * 8][t * 2 + r / 2 * 8 + n] = Half(own.a[r] >> 16 * n);
        for (int r = 0; r < K / 8; r++)
            for (int n = 0; n < 2; n++) b[t * 2 + r * 8 + n][g] = Half(own.b[r] >> 16 * n);
    }
    float A[16][K], B[K][8];
    std::transform(a[0], a[0] + 16 * K, A[0], wide);
    std::transform(b[0], b[0] + K * 8, B[0], wide);
    add_product<K, 2, kLeast>(A, B, lanes);
}

// One number a register, of which the tensor cores read the upper 19 bits.
static void multiply_tf32(void* const* lanes) {
    float A[16][8], B[8][8];
    for (int lane = 0; lane < kWarp; lane++) {
        const auto& own = *static_cast<Product*>(lanes[lane]);
        int g = lane / 4, t = lane % 4;
        for (int r = 0; r < 4; r++) A[g + r % 2 * 8][t + r / 2 * 4] = float_of(own.a[r] & 0xffffe000u);
        for (int r = 0; r < 2; r++) B[t + r * 4][g] = float_of(own.b[r] & 0xffffe000u);
    }
    add_product<8, 4, -126>(A, B, lanes);
}

struct Matrices {  // one row of 16 bytes that the lane points at, and the registers that it gets
    unsigned* registers;
    const Byte* row;
    const void* place;
};

// Matrix n is 8 rows of 8 numbers, which lanes 8 * n to 8 * n + 7 point at.
template <int Count, bool transposed>
static void load_matrices(void* const* lanes) {
    Machine& m = *machine;
    const int arrived_last = m.current;
    for (int n = 0; n < Count; n++) {
        const Byte* rows[8];
        Access request[8];
        for (int i = 0; i < 8; i++) {
            const auto& own = *static_cast<Matrices*>(lanes[n * 8 + i]);
            m.current = arrived_last / kWarp * kWarp + n * 8 + i;
            check_shared(kRead, own.row, 16, "ldmatrix", own.place);
            rows[i] = own.row;
            request[i] = {own.place, reinterpret_cast<Address>(own.row), 16};
        }
        m.current = arrived_last;
        m.counts.matrices++;
        served(request, 8);
        for (int lane = 0; lane < kWarp; lane++) {
            int i = lane / 4, j = lane % 4 * 2;
            Half low, high;
            memcpy(&low, transposed ? rows[j] + 2 * i : rows[i] + 2 * j, 2);
            memcpy(&high, transposed ? rows[j + 1] + 2 * i : rows[i] + 2 * j + 2, 2);
            static_cast<Matrices*>(lanes[lane])->registers[n] = unsigned(high) << 16 | low;
        }
    }
}

struct Exchange {
    uint64_t value;
    int mask;
    uint64_t result;
};

static void exchange(void* const* lanes) {
    machine->counts.shuffles++;
    for (int lane = 0; lane < kWarp; lane++) {
        auto& own = *static_cast<Exchange*>(lanes[lane]);
        own.result = static_cast<Exchange*>(lanes[lane ^ own.mask])->value;
    }
}

static void vote(void* const* lanes) {
    bool any = false;
    for (int lane = 0; lane < kWarp; lane++) any |= static_cast<Exchange*>(lanes[lane])->value != 0;
    for (int lane = 0; lane < kWarp; lane++) static_cast<Exchange*>(lanes[lane])->result = any;
}

int thread_x() { return machine->current; }
int block_x() { return machine->block[0]; }
char* dynamic_shared() { return reinterpret_cast<char*>(machine->shared); }

void barrier() { meet_all(HERE, false); }
bool barrier_any(bool flag) { return meet_all(HERE, flag); }

bool warp_any(bool flag) {
    Exchange own{flag, 0, 0};
    meet("warp_any", HERE, &own, vote);
    return own.result;
}

unsigned long long shuffle_xor(unsigned long long value, int mask) {
    Exchange own{value, mask, 0};
    meet("shuffle_xor", HERE, &own, exchange);
    return own.result;
}

void mma_16816_half(float* d, const unsigned* a, const unsigned* b) {
    Product own{d, a, b};
    meet("mma_16816", HERE, &own, multiply_16_bit<16, from_half, -14>);
}

void mma_16816_bfloat(float* d, const unsigned* a, const unsigned* b) {
    Product own{d, a, b};
    meet("mma_16816", HERE, &own, multiply_16_bit<16, from_bfloat, -126>);
}

void mma_1688_half(float* d, const unsigned* a, const unsigned* b) {
    Product own{d, a, b};
    meet("mma_1688", HERE, &own, multiply_16_bit<8, from_half, -14>);
}

void mma_1688_tf32(float* d, const unsigned* a, const unsigned* b) {
    Product own{d, a, b};
    meet("mma_1688_tf32", HERE, &own, multiply_tf32);
}

void ldmatrix_x4(unsigned* r, const void* row) {
    Matrices own{r, static_cast<const Byte*>(row), HERE};
    meet("ldmatrix_x4", HERE, &own, load_matrices<4, false>);
}

void ldmatrix_x4_trans(unsigned* r, const void* row) {
    Matrices own{r, static_cast<const Byte*>(row), HERE};
    meet("ldmatrix_x4_trans", HERE, &own, load_matrices<4, true>);
}

void copy_async_16(void* shared, const void* global) {
    begin_copy({static_cast<Byte*>(shared), static_cast<const Byte*>(global), HERE});
}

void commit_copies() {
    Thread& thread = machine->thread();
    thread.groups.push_back(thread.copies.size());
}

void wait_copies(int groups) { finish_copies(size_t(groups)); }

// The hardware takes subnormal numbers for zero, and gives zero for them.
float exp2_approx(float x) {
    float y = std::exp2(std::fabs(x) < 0x1p-126f ? 0.0f : x);
    return y < 0x1p-126f ? 0.0f : y;
}

}  // namespace fibers
