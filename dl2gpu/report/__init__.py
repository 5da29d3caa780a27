"""What a scan found, and one writer an output."""
