"""What the nightly scan is made of: configuration, state, groups of findings, digest, messages."""
