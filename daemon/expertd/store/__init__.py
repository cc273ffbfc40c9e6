"""Model files: what they hold, where each expert's bytes are, and how they are read.

Files are opened read-only and never mapped. Knows nothing of the cache, sockets or event loops.
"""
