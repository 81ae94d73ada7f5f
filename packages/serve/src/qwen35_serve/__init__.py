"""qwen35_serve."""
