// c = a + b, element by element: the kernel of `remap demo vector-add`.
// One thread an element; threads past the end of the last, ragged block do nothing.
extern "C" __global__ void vector_add(const float *a, const float *b, float *c, unsigned long long n)
{
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < n)
        c[i] = a[i] + b[i];
}
