// remap.cuh: what a CUDA C++ kernel needs to take remap's arrays as a Python kernel does.
//
//     #include <remap.cuh>      // remap.load and remap.compile find it by themselves
//
//     extern "C" __global__ void twice(remap::slice<float> x, remap::disjoint_slice<float> out)
//     {
//         auto i = remap::thread_index::linear();
//         if (float *mine = out.get(remap::move(i))) *mine = 2 * x[i.number()];
//     }
//
// A slice is an address and a length, 16 bytes, as launch packs an array with a type for it. A disjoint_slice is written
// through a thread_index only, which cannot be made from a number or copied: one thread, one element.

#ifndef REMAP_CUH
#define REMAP_CUH

namespace remap {

// Moving without <utility>, which NVRTC does not have.
template <class T> struct plain { using type = T; };
template <class T> struct plain<T &> { using type = T; };
template <class T> __device__ constexpr typename plain<T>::type &&move(T &&value)
{
    return static_cast<typename plain<T>::type &&>(value);
}

// Elements that are read. An index outside ends the kernel; get gives another value there.
template <class T> class slice {
public:
    __device__ long long size() const { return length; }
    __device__ const T &operator[](long long i) const
    {
        if (!contains(i)) __trap();
        return address[i];
    }
    __device__ T get(long long i, T other) const { return contains(i) ? address[i] : other; }
    __device__ bool contains(long long i) const { return (unsigned long long)i < (unsigned long long)length; }
    __device__ const T *data() const { return address; }

private:
    const T *address;
    long long length;
};

// The calling thread's own index. Which kind it is belongs to its type, so that two kinds cannot be mixed in one slice.
struct linear_space {};
template <int Stride> struct grid_space {};
struct width_space {};

template <class Space> class index_of {
public:
    index_of(const index_of &) = delete;
    index_of &operator=(const index_of &) = delete;
    __device__ index_of(index_of &&other) : value(other.value), owns(other.owns) { other.owns = false; }

    // For reads and comparisons; no number becomes an index again.
    __device__ long long number() const { return value; }

private:
    template <class, class> friend class disjoint_slice;
    friend struct thread_index;
    __device__ index_of(long long value, bool owns) : value(value), owns(owns) {}
    long long value;
    bool owns;  // false once it was moved away, and for a thread that has no element
};

struct thread_index {
    // For grids and blocks of one dimension; a thread of any other has no element.
    __device__ static index_of<linear_space> linear()
    {
        const bool flat = gridDim.y == 1 && gridDim.z == 1 && blockDim.y == 1 && blockDim.z == 1;
        return {(long long)blockIdx.x * blockDim.x + threadIdx.x, flat};
    }
    // Rows along y, columns along x; a column that is not below the stride has no element.
    template <int Stride> __device__ static index_of<grid_space<Stride>> grid()
    {
        static_assert(Stride > 0, "a stride is above 0");
        return place<grid_space<Stride>>(Stride);
    }
    // The same with a width that is known at run time, up to 2^36; with a wider one no thread has an element. It has to be
    // the same for all threads.
    __device__ static index_of<width_space> grid(long long width) { return place<width_space>(width); }

private:
    template <class Space> __device__ static index_of<Space> place(long long stride)
    {
        const long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y;
        const long long col = (long long)blockIdx.x * blockDim.x + threadIdx.x;
        // A grid has fewer than 2^26 rows of threads, so that the number of an element fits up to this width.
        const bool fits = stride <= 1LL << 36;
        return {fits ? row * stride + col : -1, fits && col < stride && gridDim.z == 1 && blockDim.z == 1};
    }
};

// Elements of which each thread writes its own.
template <class T, class Space = linear_space> class disjoint_slice {
public:
    __device__ long long size() const { return length; }

    // The thread's element, or null where it has none. Takes the index: one element, once.
    __device__ T *get(index_of<Space> &&i)
    {
        const bool mine = i.owns && (unsigned long long)i.value < (unsigned long long)length;
        i.owns = false;
        return mine ? address + i.value : nullptr;
    }

    // Any element, for reductions and the like: that no two threads meet there is the caller's promise.
    __device__ T &unchecked(long long i)
    {
        if ((unsigned long long)i >= (unsigned long long)length) __trap();
        return address[i];
    }

private:
    T *address;
    long long length;
};

static_assert(sizeof(slice<char>) == 16, "an address and a length");
static_assert(sizeof(disjoint_slice<char>) == 16, "an address and a length");

// Order what was written through one address of aliased memory before what is read through another.
__device__ inline void alias_fence() { asm volatile("fence.proxy.alias;" ::: "memory"); }

}  // namespace remap

#endif
