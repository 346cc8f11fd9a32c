// What the kernels that remap makes from Python use. Nothing here is undefined for any value of its arguments, and
// every function gives the bits that NumPy gives on the host.

namespace made_by_remap {

// -- types --

template <class T> struct wide { using type = unsigned int; };
template <> struct wide<long long> { using type = unsigned long long; };
template <> struct wide<unsigned long long> { using type = unsigned long long; };

template <class T> struct is_signed { static constexpr bool value = T(-1) < T(0); };

template <class T> __device__ T infinity();
template <> __device__ inline float infinity<float>() { return __int_as_float(0x7f800000); }
template <> __device__ inline double infinity<double>() { return __longlong_as_double(0x7ff0000000000000LL); }
template <class T> __device__ T not_a_number();
template <> __device__ inline float not_a_number<float>() { return __int_as_float(0x7fc00000); }
template <> __device__ inline double not_a_number<double>() { return __longlong_as_double(0x7ff8000000000000LL); }

// -- numbers --

// Narrow results are computed in 32 bits and cut down after a barrier: without it the compiler makes 16-bit operations of
// them, and ptxas 13.0 was seen on H200 to widen -(-32768) in 16 bits to 32768.
template <class T> __device__ inline T narrowed(typename wide<T>::type wider)
{
    if constexpr (sizeof(T) < 4) asm("" : "+r"(wider));
    return (T)wider;
}
template <class T> __device__ inline T add(T a, T b) { return narrowed<T>((typename wide<T>::type)a + (typename wide<T>::type)b); }
template <class T> __device__ inline T subtract(T a, T b) { return narrowed<T>((typename wide<T>::type)a - (typename wide<T>::type)b); }
template <class T> __device__ inline T multiply(T a, T b) { return narrowed<T>((typename wide<T>::type)a * (typename wide<T>::type)b); }

template <class T> __device__ inline T smaller(T a, T b) { return b < a ? b : a; }
template <class T> __device__ inline T larger(T a, T b) { return b > a ? b : a; }

template <class T> __device__ inline T absolute(T a) { return a < T(0) ? subtract<T>(T(0), a) : a; }
template <> __device__ inline float absolute<float>(float a) { return ::fabsf(a); }
template <> __device__ inline double absolute<double>(double a) { return ::fabs(a); }

__device__ inline bool is_nan(float a) { return a != a; }
__device__ inline bool is_nan(double a) { return a != a; }

template <class T> struct divider {
    __device__ static T quotient(T a, T b)
    {
        if (b == T(0)) return T(0);
        if (is_signed<T>::value && b == T(-1)) return subtract<T>(T(0), a);
        T q = (T)(a / b);
        if (is_signed<T>::value && a % b != 0 && (a < T(0)) != (b < T(0))) q = (T)(q - 1);
        return q;
    }
    __device__ static T remainder(T a, T b)
    {
        if (b == T(0) || (is_signed<T>::value && b == T(-1))) return T(0);
        T r = (T)(a % b);
        if (is_signed<T>::value && r != T(0) && (r < T(0)) != (b < T(0))) r = (T)(r + b);
        return r;
    }
};

// As NumPy does it for floats: from the remainder, which is exact.
template <class T> struct float_divider {
    __device__ static T remainder(T a, T b)
    {
        T r = (T)::fmod(a, b);
        if (b == T(0)) return r;
        if (r != T(0)) {
            if ((b < T(0)) != (r < T(0))) r += b;
        } else {
            r = (T)::copysign(T(0), b);
        }
        return r;
    }
    __device__ static T quotient(T a, T b)
    {
        if (b == T(0)) return a / b;
        T r = (T)::fmod(a, b);
        T q = (a - r) / b;
        if (r != T(0) && (b < T(0)) != (r < T(0))) q -= T(1);
        if (q != T(0)) {
            T whole = (T)::floor(q);
            if (q - whole > T(0.5)) whole += T(1);
            return whole;
        }
        return (T)::copysign(T(0), a / b);
    }
};
template <> struct divider<float> : float_divider<float> {};
template <> struct divider<double> : float_divider<double> {};

template <class T> __device__ inline T floor_divide(T a, T b) { return divider<T>::quotient(a, b); }
template <class T> __device__ inline T remainder_of(T a, T b) { return divider<T>::remainder(a, b); }

template <class T> __device__ inline T shift_left(T a, T b)
{
    return b >= T(0) && (unsigned long long)b < 8 * sizeof(T) ? (T)((typename wide<T>::type)a << b) : T(0);
}
template <class T> __device__ inline T shift_right(T a, T b)
{
    if (b >= T(0) && (unsigned long long)b < 8 * sizeof(T)) return (T)(a >> b);
    return a < T(0) ? T(-1) : T(0);
}

template <class To, class From> __device__ inline To to_integer(From a)
{
    constexpr bool sign = is_signed<To>::value;
    constexpr To lowest = sign ? (To)(1ULL << (8 * sizeof(To) - 1)) : To(0);
    constexpr To highest = (To)(sign ? (1ULL << (8 * sizeof(To) - 1)) - 1 : ~0ULL);
    if (a != a) return To(0);
    if (a <= (From)lowest) return lowest;
    if (a >= (From)highest) return highest;  // (From)highest may be one more, which no value in between reaches
    return (To)a;
}

// The next number of a range. One that no long long is would be beyond any end, and so is the last that there is.
__device__ inline long long advance(long long a, long long b)
{
    constexpr long long highest = 9223372036854775807LL, lowest = -highest - 1;
    if (b > 0) return a > highest - b ? highest : a + b;
    return a < lowest - b ? lowest : a + b;
}

__device__ inline int compare(unsigned long long a, long long b)
{
    return b < 0 || a > (unsigned long long)b ? 1 : a == (unsigned long long)b ? 0 : -1;
}
__device__ inline int compare(long long a, unsigned long long b) { return -compare(b, a); }

// -- memory --

template <class T, int N> struct array;
template <class T> struct array<T, 1> {
    T *p;
    long long n;
    __device__ long long extent(int) const { return n; }
};
template <class T> struct array<T, 2> {
    T *p;
    long long n, n0, n1;
    __device__ long long extent(int axis) const { return axis < 0 ? n : axis == 0 ? n0 : n1; }
};
template <class T> struct array<T, 3> {
    T *p;
    long long n, n0, n1, n2;
    __device__ long long extent(int axis) const { return axis < 0 ? n : axis == 0 ? n0 : axis == 1 ? n1 : n2; }
};

__device__ inline bool inside(long long i, long long n) { return (unsigned long long)i < (unsigned long long)n; }

// An index outside of its array would be somebody else's memory, so it ends the kernel.
__device__ inline void require(bool fine) { if (!fine) __trap(); }

template <class T> __device__ inline T &at(const array<T, 1> &a, long long i)
{
    require(inside(i, a.n));
    return a.p[i];
}
template <class T> __device__ inline T &at(const array<T, 2> &a, long long i, long long j)
{
    require(inside(i, a.n0) && inside(j, a.n1));
    return a.p[i * a.n1 + j];
}
template <class T> __device__ inline T &at(const array<T, 3> &a, long long i, long long j, long long k)
{
    require(inside(i, a.n0) && inside(j, a.n1) && inside(k, a.n2));
    return a.p[(i * a.n1 + j) * a.n2 + k];
}

template <class T> __device__ inline T get(const array<T, 1> &a, T other, long long i)
{
    return inside(i, a.n) ? a.p[i] : other;
}
template <class T> __device__ inline T get(const array<T, 2> &a, T other, long long i, long long j)
{
    return inside(i, a.n0) && inside(j, a.n1) ? a.p[i * a.n1 + j] : other;
}
template <class T> __device__ inline T get(const array<T, 3> &a, T other, long long i, long long j, long long k)
{
    return inside(i, a.n0) && inside(j, a.n1) && inside(k, a.n2) ? a.p[(i * a.n1 + j) * a.n2 + k] : other;
}

__device__ inline long long dynamic_size()
{
    unsigned int size;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(size));
    return size;
}

// -- the thread's own index --

struct thread_index {
    long long number, row, col;
    bool owns;  // whether this thread may write at its number

    __device__ bool has(long long n) const { return owns && inside(number, n); }

    __device__ static thread_index linear()
    {
        return {(long long)blockIdx.x * blockDim.x + threadIdx.x, 0, 0, true};
    }
    __device__ static thread_index grid(long long stride)
    {
        const long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y;
        const long long col = (long long)blockIdx.x * blockDim.x + threadIdx.x;
        // A grid has fewer than 2^26 rows of threads. With a width above 2^36 the number might not fit, and two threads
        // would have one element.
        const bool owns = col < stride && stride <= 1LL << 36;
        return {owns ? row * stride + col : -1, row, col, owns};
    }
    __device__ static thread_index warp()
    {
        const unsigned int warps = (blockDim.x + 31) / 32;
        return {(long long)blockIdx.x * warps + threadIdx.x / 32, 0, 0, threadIdx.x % 32 == 0};
    }
};

template <class T, int N> __device__ inline T own(const array<T, N> &a, const thread_index &i, T other)
{
    return inside(i.number, a.n) ? a.p[i.number] : other;
}
template <class T, int N> __device__ inline T own(const array<T, N> &a, const thread_index &i)
{
    T zero{};
    return inside(i.number, a.n) ? a.p[i.number] : zero;
}

// -- atomics: 4 and 8 bytes --

template <class T, int Size> struct bits;
template <class T> struct bits<T, 4> {
    using type = unsigned int;
    __device__ static type of(T a) { return *reinterpret_cast<type *>(&a); }
    __device__ static T from(type a) { return *reinterpret_cast<T *>(&a); }
};
template <class T> struct bits<T, 8> {
    using type = unsigned long long;
    __device__ static type of(T a) { return *reinterpret_cast<type *>(&a); }
    __device__ static T from(type a) { return *reinterpret_cast<T *>(&a); }
};

template <class T> __device__ inline T atomic_exchange(T *p, T value)
{
    using b = bits<T, sizeof(T)>;
    return b::from(atomicExch(reinterpret_cast<typename b::type *>(p), b::of(value)));
}
template <class T> __device__ inline T atomic_cas(T *p, T expected, T value)
{
    using b = bits<T, sizeof(T)>;
    return b::from(atomicCAS(reinterpret_cast<typename b::type *>(p), b::of(expected), b::of(value)));
}
template <class T, class F> __device__ inline T atomic_update(T *p, F change)
{
    using b = bits<T, sizeof(T)>;
    typename b::type *q = reinterpret_cast<typename b::type *>(p);
    typename b::type old = *reinterpret_cast<volatile typename b::type *>(q), seen;
    for (;;) {
        seen = atomicCAS(q, old, b::of(change(b::from(old))));
        if (seen == old) return b::from(old);
        old = seen;
    }
}
template <class T> __device__ inline T atomic_add(T *p, T value)
{
    using b = bits<T, sizeof(T)>;
    return b::from(atomicAdd(reinterpret_cast<typename b::type *>(p), b::of(value)));
}
template <> __device__ inline float atomic_add<float>(float *p, float value) { return atomicAdd(p, value); }
template <> __device__ inline double atomic_add<double>(double *p, double value) { return atomicAdd(p, value); }

template <class T> __device__ inline T atomic_min(T *p, T value) { return atomicMin(p, value); }
template <class T> __device__ inline T atomic_max(T *p, T value) { return atomicMax(p, value); }
template <> __device__ inline float atomic_min<float>(float *p, float value)
{
    return atomic_update(p, [value](float old) { return smaller(old, value); });
}
template <> __device__ inline double atomic_min<double>(double *p, double value)
{
    return atomic_update(p, [value](double old) { return smaller(old, value); });
}
template <> __device__ inline float atomic_max<float>(float *p, float value)
{
    return atomic_update(p, [value](float old) { return larger(old, value); });
}
template <> __device__ inline double atomic_max<double>(double *p, double value)
{
    return atomic_update(p, [value](double old) { return larger(old, value); });
}

}  // namespace made_by_remap
