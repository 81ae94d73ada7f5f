"""qwen35_engine."""
