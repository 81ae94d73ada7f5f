"""prefix_index."""
