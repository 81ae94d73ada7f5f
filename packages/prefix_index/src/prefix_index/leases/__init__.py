"""What a lane does with a path: pin it, commit blocks and snapshots to it, fill copies of them."""
