// The operations that the machine provides to its threads. Kernels see this through hardware.h.
#pragma once

namespace fibers {

int thread_x();
int block_x();
char* dynamic_shared();

void barrier();
bool barrier_any(bool flag);
bool warp_any(bool flag);
unsigned long long shuffle_xor(unsigned long long value, int mask);

void mma_16816_half(float* d, const unsigned* a, const unsigned* b);
void mma_16816_bfloat(float* d, const unsigned* a, const unsigned* b);
void mma_1688_half(float* d, const unsigned* a, const unsigned* b);
void mma_1688_tf32(float* d, const unsigned* a, const unsigned* b);
void ldmatrix_x4(unsigned* r, const void* row);
void ldmatrix_x4_trans(unsigned* r, const void* row);

void copy_async_16(void* shared, const void* global);
void commit_copies();
void wait_copies(int groups);

float exp2_approx(float x);

}  // namespace fibers
