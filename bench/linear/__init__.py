"""The linear cross-entropy operators: what is measured of them, beside whom, and what was set out to be reached."""
