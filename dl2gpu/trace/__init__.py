"""From files to the event table: discovery, one reader a format, the schema."""
