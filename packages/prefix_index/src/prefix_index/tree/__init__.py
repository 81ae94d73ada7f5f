"""The records of cached paths: edges, snapshots and holds, the tokens on them, the links between them, the counts."""
