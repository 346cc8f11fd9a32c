// The kernels of remap.collectives: ranks meet, reduce and store through multicast addresses.
//
// Every rank has the same layout (see the offsets below) in memory of its own. `own` is that memory at its own addresses,
// `all` the multicast range in which one operation reaches it on every rank. The two are aliases: within a kernel a
// `fence.proxy.alias` stands between accesses through one and through the other.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "multimem instructions need sm_90 or newer"
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

// Shared with layout.py.
#define ARRIVALS 0
#define STATUS 64
#define PARTIALS 256
#define PARTIAL_STEP 64

static __device__ float *partial(char *base, u32 slot)
{
    return (float *)(base + PARTIALS + (u64)slot * PARTIAL_STEP);
}

static __device__ void alias_fence()
{
    asm volatile("fence.proxy.alias;" ::: "memory");
}

static __device__ u64 nanoseconds()
{
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Tell every rank that this one has come, and wait until all have. All that was written before is seen behind it.
//
// The counter only grows, by one for each rank and round, and wraps around. `expected` is what it has when all ranks have
// come to this round. Some may have come to the next one already, none to the one after that, since this rank is missing
// there: so the difference is small, and its sign tells.
static __device__ bool all_have_come(char *own, char *all, u32 expected, u32 slot, u64 limit)
{
    alias_fence();
    asm volatile("multimem.red.release.sys.global.add.u32 [%0], %1;" ::"l"(all + ARRIVALS), "r"(1) : "memory");
    alias_fence();
    const u64 start = nanoseconds();
    for (;;) {
        u32 seen;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(own + ARRIVALS) : "memory");
        if ((int)(seen - expected) >= 0)
            break;
        if (nanoseconds() - start > limit) {
            *(u32 *)(own + STATUS) = 1;
            return false;
        }
    }
    // The last round that used the other slot is over on every rank, as all of them have come to this one.
    *partial(own, slot ^ 1) = 0.0f;
    alias_fence();
    return true;
}

// Wait for all ranks. One thread.
extern "C" __global__ void meet(char *own, char *all, u32 expected, u32 slot, u64 limit)
{
    all_have_come(own, all, expected, slot, limit);
}

// Add the squares of x to this rank's partial sum. Blocks of 256 threads.
extern "C" __global__ void add_squares(const float *x, u64 n, char *own, u32 slot)
{
    __shared__ float sums[256];
    float sum = 0.0f;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
        sum += x[i] * x[i];
    sums[threadIdx.x] = sum;
    for (u32 half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0)
        atomicAdd(partial(own, slot), sums[0]);
}

// Reduce the partial sums of all ranks to the norm, in the network. One thread.
extern "C" __global__ void reduce_norm(float *out, char *own, char *all, u32 expected, u32 slot, u64 limit)
{
    if (!all_have_come(own, all, expected, slot, limit))
        return;
    float sum;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.f32 %0, [%1];"
                 : "=f"(sum)
                 : "l"(partial(all, slot))
                 : "memory");
    *out = sqrtf(sum);
}

// Store x into the memory of every rank at once, at the given offset.
extern "C" __global__ void store_all(const float *x, u64 n, char *all, u64 offset)
{
    float *out = (float *)(all + offset);
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
        asm volatile("multimem.st.relaxed.sys.global.f32 [%0], %1;" ::"l"(out + i), "f"(x[i]) : "memory");
    alias_fence();
}
