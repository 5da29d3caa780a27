"""Programs on the public API of dl2gpu, for people who run it at scale. Not installed."""
