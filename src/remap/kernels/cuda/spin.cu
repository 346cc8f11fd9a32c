// A kernel that stays on the device for a number of clock ticks, and writes down when it began and ended: the kernel of
// `remap demo graph-memory`. One thread. The times are nanoseconds of the device's own timer, so that those of several
// kernels can be compared.
extern "C" __global__ void spin(unsigned char *data, unsigned long long *stamps, long long ticks)
{
    long long start = clock64();
    unsigned long long began, ended;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
    data[0] = 1;
    while (clock64() - start < ticks) { }
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ended));
    stamps[0] = began;
    stamps[1] = ended;
}
