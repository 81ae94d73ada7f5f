"""qwen35_kernels."""
