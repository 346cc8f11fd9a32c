"""To see what a program does with memory: snapshots, maps, traces, leaks. It looks, and changes nothing."""
