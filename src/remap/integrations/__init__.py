"""Where people already are: PyTorch, torch_memory_saver, vLLM, CuPy, Numba. Each is optional, and loaded by name."""
