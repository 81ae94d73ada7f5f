"""slab_pool."""
