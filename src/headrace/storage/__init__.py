"""Where things are kept: record segments on disk, the same in memory."""
